"""Continuous-batching sampler over versioned LoRA snapshots; `base.py` is the seam."""
