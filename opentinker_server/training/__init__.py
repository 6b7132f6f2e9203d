"""Training of LoRA adapters on one frozen base model.

Importing this package loads nothing: the control plane imports `loss_specs` from it, without torch.
"""
