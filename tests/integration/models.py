"""Tiny checkpoints that the tests make on the spot: six architectures with a character-level tokenizer."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

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


def make_reward_model(path: Path, name: str) -> Path:
    """A randomly initialised sequence classifier with one label, like OpenRLHF's reward models."""
    import transformers

    family, changes = ARCHITECTURES[name]
    config = getattr(transformers, f"{family}Config")(**{**_COMMON, **changes, "num_labels": 1})
    return _save(path, getattr(transformers, f"{family}ForSequenceClassification"), config, seed=1)


def make_vision_language_model(path: Path) -> Path:
    """A randomly initialised LLaVA with its processor: four patches of each image, in front of a Llama."""
    import transformers
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = _tokenizer(image_token=IMAGE)
    image_processor = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    transformers.LlavaProcessor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_CHAT_TEMPLATE,
    ).save_pretrained(path)
    text = transformers.LlamaConfig(**{**_COMMON, "vocab_size": 104})
    vision = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
        projection_dim=32,
    )
    config = transformers.LlavaConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.image_token_id,
        vision_feature_layer=-1,
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    _save_model(path, transformers.LlavaForConditionalGeneration, config)
    weights = load_file(path / "model.safetensors")
    _never_say(weights, tokenizer.image_token_id)
    # The published models' names, which vLLM wants; transformers reads both and writes its own.
    tower = "vision_tower."
    named = {name.replace(tower, f"{tower}vision_model."): value for name, value in weights.items()}
    save_file(named, path / "model.safetensors", {"format": "pt"})
    return Path(path)


def _never_say(weights: dict[str, torch.Tensor], token: int) -> None:
    """Give a language model a constant in its hidden state, which keeps one token's logit far below the others."""
    for name, weight in weights.items():
        if name.endswith("embed_tokens.weight"):
            weight[:, 0] = 1
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0
        elif name.endswith("lm_head.weight"):
            weight[token, 0] = -20


IMAGE = "<image>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
)


def _tokenizer(**special: str):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    vocabulary.update({chr(code): code - 29 for code in range(32, 127)})
    vocabulary.update({token: len(vocabulary) for token in special.values()})
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=_CHAT_TEMPLATE,
        extra_special_tokens=special,
    )


def _save(path: Path, model_class: type, config, seed: int = 0) -> Path:
    _tokenizer().save_pretrained(path)
    return _save_model(path, model_class, config, seed)


def _save_model(path: Path, model_class: type, config, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    model_class(config).to(torch.bfloat16).save_pretrained(path)
    return Path(path)
