"""The reference trainer: GRPO on verifiable tasks and SFT on text, one process, every loss and expert layer through the ops.

Read config.py, then loop.py; the other files are what the loop calls. Needs the extra `train` (tyro, rich, matplotlib,
safetensors).
"""
