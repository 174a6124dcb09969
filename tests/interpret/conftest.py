"""Triton's interpreter: kernels run in Python on CPU tensors. It must be chosen before Triton is imported, so this
folder is a pytest run of its own.
"""

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter

patch_tensor = interpreter._patch_lang_tensor


def patch_tensor_with_index(tensor: Any, scope: Any) -> None:
    """A loop bound is read from an array of one element: Triton 3.6 calls int() on it, which NumPy 2.5 refuses.

    The scope has stored the attribute before us, and restores it.
    """
    patch_tensor(tensor, scope)
    tensor.__index__ = lambda self: self.handle.data.item()


interpreter._patch_lang_tensor = patch_tensor_with_index
