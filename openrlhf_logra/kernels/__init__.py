"""Triton twins of math/: the same bits, chosen only where there is a GPU; without one nothing here is imported."""
