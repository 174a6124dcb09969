"""A plan as plain data, for --json and for other programs."""

from dataclasses import asdict
from typing import Any

from fusedce.plan.flops import forward
from fusedce.plan.gpus import Gpu
from fusedce.plan.launch import commands
from fusedce.plan.measured import HBM_SHARE, LINK_SHARE
from fusedce.plan.memory import moments
from fusedce.plan.reasons import reasons
from fusedce.plan.recipe import Answer, Candidate
from fusedce.plan.sweep import Point

MFU = {
    "model": "3 × the forward's FLOPs, scores causal, over step time and dense bf16 peak; recompute does not count",
    "hardware": "all FLOPs that run: recompute, and attention's backward at 2.5 forwards",
    "not_causal": "as model, with the whole square of scores, as some report it",
}


def as_dict(answer: Answer) -> dict[str, Any]:
    """The whole answer; bytes, seconds and FLOPs are plain numbers."""
    job, flops = answer.job, forward(answer.job.model, answer.job.seq_len)
    return {
        "model": asdict(job.model) | {"params": job.model.params, "active_params": job.model.active_params},
        "gpu": asdict(job.gpu),
        "job": {
            "gpus": job.gpus,
            "offered": answer.offered,
            "seq_len": job.seq_len,
            "tokens_per_step": job.sequences * job.seq_len,
            "policy": asdict(job.policy),
            "reserve": job.reserve,
        },
        "simplest": asdict(answer.simplest.layout),
        "reasons": [asdict(reason) for reason in reasons(answer)],
        "moments": {moment.name: moment.total for moment in moments(job, answer.layout)},
        "flops_per_token": {
            "six_n": 3 * flops.gemms,
            "model": flops.model,
            "not_causal": flops.not_causal(),
            "executed": flops.executed(answer.layout.recomputed / answer.layout.stage_layers(job.model)),
        },
        "rates": answer.best.step.rates | {"links": f"{LINK_SHARE:.0%} of the datasheet", "hbm": f"{HBM_SHARE:.0%}"},
        "launch": commands(answer),
        **_candidate(answer.best),
    }


def points_as_dicts(points: list[Point], best: Candidate) -> list[dict[str, Any]]:
    """A sweep's configurations, the fastest first."""
    return [
        {"layout": asdict(point.layout), "refused": point.refusal}
        if point.candidate is None
        else _candidate(point.candidate) | {"times_chosen": point.against(best)}
        for point in points
    ]


def comparison_as_dicts(found: list[tuple[Gpu, Answer | str]]) -> list[dict[str, Any]]:
    """One entry a card."""
    return [
        {"gpu": gpu.name, "refused": answer} if isinstance(answer, str) else as_dict(answer) for gpu, answer in found
    ]


def _candidate(candidate: Candidate) -> dict[str, Any]:
    step = candidate.step
    return {
        "layout": asdict(candidate.layout),
        "peak": {"moment": candidate.peak.name, "bytes": candidate.peak.total, "parts": candidate.peak.parts},
        "step": {"seconds": step.total, "parts": step.parts, "tokens_per_second": step.tokens_per_second},
        "mfu": {"model": step.model_mfu, "hardware": step.hardware_mfu, "not_causal": step.not_causal_mfu},
    }
