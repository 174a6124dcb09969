"""An emulator of gfx942 (MI300X) and gfx950 (MI355X): it executes the machine code of kernels on a machine without a
GPU.

    from tests.gfx9emu.driver import emulated
    with emulated("gfx942"):
        kernel[grid](cpu_tensor, …)             # any Triton kernel: compiled for gfx942, executed here

What a GPU would do wrong in silence is a `faults.FaultError` with the instruction and its source line: accesses out of
bounds (buffers lie between red zones), loads of bytes that nobody wrote, races between waves in LDS and between
workgroups in global memory, a barrier that not all waves reach, more LDS or threads than there are. An instruction that
no table knows, or a modifier that nobody asks for, is a fault with its text: nothing is guessed.

Where things are, from the text of the code object to the launch:

    decode       llvm-objdump's lines as `Instruction`s
    operands     "-|v3|", "s[4:5]", "0x40" as functions that read or write a `Front`
    front        the registers of waves that stand at the same instruction, side by side
    scalar       instructions on scalars, and conditions of branches
    arithmetic   tables of what one lane computes; `vector` binds them to registers
    lanes        DPP and SDWA: operands from other lanes, or parts of words
    matrix       MFMA, with its layouts
    loads, shared, data   global memory, buffers and scratch; LDS; bytes from and to registers
    memory       bytes, who may touch them, and who did
    code_object  what a kernel asks for, and its basic blocks
    launch       workgroups, barriers, where fronts part and meet
    driver       Triton;  hip  the host code of HIP sources

An instruction is bound once, to a closure over its operands; executing it is one call for all waves of a front, up to
64.

To add an instruction, say v_sad_u32 (vector, three words, a word out):

1. `arithmetic.WHOLE`: "v_sad_u32": ("w:www", lambda a, b, c: np.maximum(a, b) - np.minimum(a, b) + c). Arrays
   broadcast to (waves, 64) and wrap as the hardware does. What needs more than its operands gets a function in
   `vector.SPECIAL` instead: it takes the operands' texts and returns the step.
2. `test_arithmetic.REFERENCE`: the same for one lane in Python's own numbers; a row without one fails a test by name.
3. A modifier that is new must be taken (`ins.take`, `ins.number`) by whoever binds it, else it stays a fault.

What is not modelled: time, caches and the waits for them (a missing s_waitcnt is not seen), the order in which the
hardware would run waves, denormals of fp32 flushed by mode, atomics, and the last bit of transcendental functions,
which are rounded correctly here and are good to one unit there."""
