"""Policy sync: records of updates, the trainer's end, the rollout engine's end (docs/sync.md)."""
