"""LoGRA for OpenRLHF: reinforcement learning of language models with low-rank gradient sketches."""

__version__ = "0.1.0"
