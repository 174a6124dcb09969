"""The reference trainer: GRPO on verifiable tasks and SFT on text, every loss and expert layer through the ops.

On one process or, under torchrun, any number. Read config.py, then loop.py, then grpo.py; for what lies on which rank
mesh.py, then sharding.py; the other files are what these call. Needs the extra `train` (tyro, rich, matplotlib,
safetensors).
"""
