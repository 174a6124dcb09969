"""The reference trainer: GRPO on verifiable tasks and SFT on text, every loss and expert layer through the ops.

One process: a CPU or one GPU. Read config.py, then loop.py, then grpo.py; the other files are what these call. Needs
the extra `train` (tyro, rich, matplotlib, safetensors).
"""
