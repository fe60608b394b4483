"""The mathematics of LoGRA: plain torch, no host. Each module holds one idea and is testable alone."""
