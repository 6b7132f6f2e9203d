"""Frozen base models with LoRA on packed token rows; shared by training and sampling.

`base.py` runs a model, `attention.py` and `lora.py` say what its rows see and which adapter each uses,
`peft_adapter.py` leaves names, initialisation and files to PEFT, `registry.py` finds model directories.
"""
