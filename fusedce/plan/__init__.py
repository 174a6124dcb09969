"""The planner: one layout for a model on some GPUs, its reasons, and its memory and time. Pure Python, no torch.

`gpus` and `models` are data; `flops`, `memory` and `seconds` predict; `recipe` chooses, `reasons` says why; `sweep` and
`compare` show what else there was; `command` is `fusedce plan`.
"""
