"""Why a plan is what it is: for every dimension the constraint that binds, and the slack."""

from dataclasses import dataclass, replace

from fusedce import env
from fusedce.plan.layout import Job, Layout, refuse
from fusedce.plan.memory import peak
from fusedce.plan.recipe import Answer, best_of, expert_parallel
from fusedce.plan.seconds import link_rate, rows_sent

GB = 1e9


@dataclass(frozen=True)
class Reason:
    """One dimension: its value, what binds it, and the slack."""

    dim: str
    value: str
    bound_by: str
    slack: str


def reasons(answer: Answer) -> list[Reason]:
    """All dimensions, in the order of the recipe."""
    job, layout = answer.job, answer.layout
    found = [_experts(answer), _context(answer), _recompute(answer), _chunks(answer)]
    return [*found, _tensor(job, layout), _pipeline(job, layout), _data(answer), _loss(job, layout)]


def _experts(answer: Answer) -> Reason:
    job, layout, simplest = answer.job, answer.layout, answer.simplest
    if not job.model.experts:
        return Reason("EP", "1", "no experts", "")
    preferred, local = expert_parallel(job, layout.pp, layout.tp), job.model.experts // layout.ep
    if layout.ep > preferred:
        why = f"memory: EP {preferred} fits with no CP"
        if simplest.layout.ep == preferred:
            slower = simplest.step.total / answer.best.step.total - 1
            why = f"speed: EP {preferred} with CP {simplest.layout.cp} is {slower:.0%} slower"
    elif layout.ep == job.gpu.per_node // layout.tp:
        why = f"the node: {job.gpu.per_node} cards on {job.gpu.link / GB:.0f} GB/s links"
    elif local <= 2:
        why = "the expert count: at least two a rank, so that the busiest expert is not the busiest rank"
    else:
        why = f"divisors: the most of {layout.stage} ranks and {job.model.experts} experts within a node"
    return Reason("EP", str(layout.ep), why, f"{local} experts a rank")


def _context(answer: Answer) -> Reason:
    job, layout, simplest = answer.job, answer.layout, answer.simplest
    local = f"{layout.local_tokens(job):,} tokens a rank"
    if layout.cp == 1:
        return Reason("CP", "1", "memory: a whole sequence fits on a rank", local)
    if layout.cp > simplest.layout.cp:
        slower = simplest.step.total / answer.best.step.total - 1
        again = f"recomputes {simplest.layout.recomputed} layers"
        why = f"speed: CP {simplest.layout.cp} fits too, but {again} and is {slower:.0%} slower"
        return Reason("CP", str(layout.cp), why, local)
    smaller = max(cp for cp in range(1, layout.cp) if layout.cp % cp == 0)
    before = replace(layout, cp=smaller, dp=layout.stage // smaller)
    refused = refuse(job, before)
    why = f"shape: {refused}"
    if refused is None:
        full = replace(before, recomputed=before.stage_layers(job.model))
        why = f"memory: CP {smaller} takes {peak(job, full).total / GB:.1f} GB with all layers recomputed"
    elif before.dp > job.sequences:
        why = f"the batch: {refused}"
    return Reason("CP", str(layout.cp), why, local)


def _recompute(answer: Answer) -> Reason:
    job, layout = answer.job, answer.layout
    layers = layout.stage_layers(job.model)
    value, free = f"{layout.recomputed} of {layers} layers", job.budget + job.reserve - answer.best.peak.total
    if answer.forced_recompute:
        return Reason("recompute", value, "asked for", f"{free / GB:.1f} GB free")
    if layout.recomputed == 0:
        return Reason("recompute", value, "memory: all activations fit", f"{free / GB:.1f} GB free")
    fewer = peak(job, replace(layout, recomputed=layout.recomputed - 1)).total
    why = f"memory: {layout.recomputed - 1} would take {fewer / GB:.1f} of {job.gpu.memory / GB:.0f} GB"
    return Reason("recompute", value, why, f"{free / GB:.1f} GB free")


def _chunks(answer: Answer) -> Reason:
    job, layout = answer.job, answer.layout
    if not job.model.experts:
        return Reason("MoE chunks", "1", "no experts", "")
    rows = round(layout.local_tokens(job) * job.model.top_k * layout.ep / job.model.experts / layout.chunks)
    slack = f"{rows:,} rows an expert and chunk"
    if layout.chunks == 1:
        return Reason("MoE chunks", "1", "time: more would be computed twice for nothing", slack)
    whole = best_of(job, replace(layout, chunks=1))
    smaller = replace(layout, chunks=layout.chunks // 2)
    if peak(job, smaller).total > job.budget + job.reserve:
        why = f"memory: {smaller.chunks} would take {peak(job, smaller).total / GB:.1f} GB"
    elif layout.ep > 1:
        sent = rows_sent(layout.ep, job.model.top_k) / (link_rate(job.gpu, layout.ep) / GB)
        why = f"time: hides the exchange ({sent * job.model.hidden * 2:.0f} ns a token and direction) behind the GEMMs"
    else:
        why = "time: less to recompute" if whole is None or whole.step.total > answer.best.step.total else "memory"
    return Reason("MoE chunks", str(layout.chunks), why, slack)


def _tensor(job: Job, layout: Layout) -> Reason:
    layer = 2 * (job.model.dense_params / job.model.layers + job.model.routed_params / layout.ep) / layout.tp
    if layout.tp == 1:
        why = f"a gathered layer is {layer / GB:.2f} GB, {layer / job.gpu.memory:.1%} of a card"
        return Reason("TP", "1", why, f"at most {job.model.kv_heads}, the key and value heads")
    return Reason("TP", str(layout.tp), "memory: nothing with TP 1 fits", f"at most {job.model.kv_heads}")


def _pipeline(job: Job, layout: Layout) -> Reason:
    micro = layout.micro_batches(job)
    if layout.pp > 1:
        bubble = (layout.pp - 1) / (micro + layout.pp - 1)
        return Reason("PP", str(layout.pp), "memory: nothing with PP 1 fits", f"bubble {bubble:.1%}")
    # Half the ranks a stage: twice as many rounds.
    bubble = 1 / (2 * micro + 1)
    return Reason(
        "PP", "1", "simplicity: weights are sharded over all ranks without it", f"PP 2's bubble: {bubble:.1%}"
    )


def _data(answer: Answer) -> Reason:
    job, layout = answer.job, answer.layout
    micro = layout.micro_batches(job)
    empty = micro * layout.dp - job.sequences
    slack = f"{micro} rounds" + (f", {empty} of {micro * layout.dp} places empty" if empty else "")
    idle = answer.offered - layout.world
    why = "what is left; weights, gradients and optimizer are sharded over all ranks of a stage"
    return Reason("DP", str(layout.dp), f"{idle} cards cannot be used; the rest" if idle else why, slack)


def _loss(job: Job, layout: Layout) -> Reason:
    workspace = env.workspace_bytes(2 * job.model.head_params)
    rows = max(workspace // (2 * job.model.vocab) // 128, 1) * 128
    tokens = layout.local_tokens(job)
    logits = 2 * tokens * job.model.vocab / GB
    value = f"{min(rows, tokens):,} rows a chunk"
    return Reason(
        "linear CE", value, f"FUSEDCE_WORKSPACE_MB, {workspace >> 20} MiB", f"the logits would be {logits:.1f} GB"
    )
