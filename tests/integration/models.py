"""Tiny checkpoints that the tests make on the spot: six architectures with a character-level tokenizer."""

from pathlib import Path

import torch

_COMMON = {
    "vocab_size": 99,  # divides by nothing: vLLM pads it, and splits it unevenly
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "initializer_range": 0.1,
}
# What is odd about each: see the comments. With one key-value head, two workers hold copies of it.
ARCHITECTURES = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),  # attention bias
    "qwen3": ("Qwen3", {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}),  # wider than hidden
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True, "intermediate_size": 88}),
    "mistral": ("Mistral", {"head_dim": 64, "sliding_window": None, "num_hidden_layers": 1}),
    "phi3": ("Phi3", {"num_key_value_heads": 2}),  # the checkpoint itself is fused
    "gemma3": ("Gemma3", {"head_dim": 32, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 32}),
}


def make_architecture(path: Path, name: str) -> Path:
    """A randomly initialised bf16 model of one of ARCHITECTURES, with its tokenizer."""
    import transformers

    family, changes = ARCHITECTURES[name]
    text = "Text" if family == "Gemma3" else ""
    config = getattr(transformers, f"{family}{text}Config")
    return _save(path, getattr(transformers, f"{family}ForCausalLM"), config(**{**_COMMON, **changes}))


def make_model(path: Path, seed: int = 0, **overrides) -> Path:
    """A randomly initialised bf16 Qwen2 with its tokenizer, in Hugging Face format."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return _save(path, Qwen2ForCausalLM, Qwen2Config(**{**_COMMON, "tie_word_embeddings": True, **overrides}), seed)


def _save(path: Path, model_class: type, config, seed: int = 0) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    vocabulary.update({chr(code): code - 29 for code in range(32, 127)})
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    fast.save_pretrained(path)
    torch.manual_seed(seed)
    model_class(config).to(torch.bfloat16).save_pretrained(path)
    return Path(path)
