"""Base models, attention, LoRA linears and PEFT files. Knows nothing of training, sampling or the wire."""
