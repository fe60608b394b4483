"""Tiny checkpoints that the tests make on the spot: Qwen2 with a byte-level tokenizer."""

from pathlib import Path

import torch


def make_model(path: Path, seed: int = 0, **overrides) -> Path:
    """A randomly initialised bf16 Qwen2 with its tokenizer, in Hugging Face format."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    vocabulary.update({chr(code): code - 29 for code in range(32, 127)})
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    fast.save_pretrained(path)
    torch.manual_seed(seed)
    settings = {
        "vocab_size": 99,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
        "initializer_range": 0.1,
    }
    model = Qwen2ForCausalLM(Qwen2Config(**{**settings, **overrides})).to(torch.bfloat16)
    model.save_pretrained(path)
    return Path(path)
