"""Triton's interpreter: kernels run in Python on CPU tensors. It must be chosen before Triton is imported, so this
folder is a pytest run of its own.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
