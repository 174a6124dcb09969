"""What to type: the run of `fusedce train` where it can do what was planned, and the mesh and launcher for an engine
where it cannot. `fusedce train` has FSDP and expert parallelism; it has no context or tensor parallelism, no pipeline.
"""

from fusedce.plan.layout import Job, Layout
from fusedce.plan.recipe import Answer

MESH = ("pp", "dp", "cp", "tp")


def commands(answer: Answer) -> list[str]:
    """Lines for a shell, comments among them."""
    job, layout = answer.job, answer.layout
    if layout.world == 1 and trainable(job):
        return [
            f"fusedce train sft {train_flags(job, layout)}",
            "# in one process it gathers nothing, but keeps its stream in fp32 and bf16 copies of weights (autocast):",
            "# long sequences take more than this plan says",
        ]
    nodes, per_node = _nodes(job, layout)
    shape = ", ".join(str(getattr(layout, dim)) for dim in MESH)
    torchrun = f"torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    if layout.world > 1 and layout.dp == layout.world and trainable(job):
        return [f"{torchrun} -m fusedce.train sft {train_flags(job, layout)} --ep {layout.ep}"]
    lines = [
        f"{torchrun} TRAIN.py",
        f"# its mesh: init_device_mesh(DEVICE, ({shape}), mesh_dim_names={MESH}),",
        f"# with EP {layout.ep} folded into dp, cp and tp",
    ]
    if layout.world > 1:
        lines.append(
            "# TRAIN.py is an engine of yours: fusedce train has no CP, TP or PP, and the shape of Qwen3-MoE alone"
        )
    return lines


def trainable(job: Job) -> bool:
    """Whether `fusedce train` can build the model: full attention, experts in every layer and none that all share."""
    model = job.model
    plain = not (model.sliding_layers or model.linear_layers or model.latent or model.gated)
    return plain and model.experts > 0 and not model.shared_ffn and not model.dense_layers


def train_flags(job: Job, layout: Layout) -> str:
    """Options of `fusedce train sft` for the model, the sequence and the batch."""
    model = job.model
    options = {
        "seq-len": job.seq_len,
        "batch-size": job.sequences,
        "micro-batch": 1,
        "model.vocab-size": model.vocab,
        "model.hidden-size": model.hidden,
        "model.num-layers": model.layers,
        "model.num-heads": model.heads,
        "model.num-kv-heads": model.kv_heads,
        "model.head-dim": model.head_dim,
        "model.ffn-size": model.ffn,
        "model.num-experts": model.experts,
        "model.top-k": model.top_k,
        "model.recompute": round(layout.recomputed / model.layers, 4),
        "model.moe-chunks": layout.chunks,
    }
    tied = " --model.tied" if model.tied else ""
    return " ".join(f"--{name} {value}" for name, value in options.items()) + tied


def _nodes(job: Job, layout: Layout) -> tuple[int, int]:
    """Nodes and processes in each: full nodes where the ranks divide, else the most that do."""
    most = min(job.gpu.per_node, layout.world)
    per_node = max(count for count in range(1, most + 1) if layout.world % count == 0)
    return layout.world // per_node, per_node
