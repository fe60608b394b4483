"""The training side: which parameters are sketched, how DeepSpeed shards them, and the step at a boundary."""
