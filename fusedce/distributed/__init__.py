"""The ops over several processes: the same kernels, on a shard."""

from fusedce.distributed.clip import clip_grad_norm_
from fusedce.distributed.dispatchers import choose_dispatcher
from fusedce.distributed.expert_group import new_expert_group
from fusedce.distributed.expert_pipeline import expert_parallel_moe
from fusedce.distributed.expert_plan import ExpertPlan, auto_chunks, expert_plan
from fusedce.distributed.kept_plans import keep_plans
from fusedce.distributed.moe import ExpertParallelMoE
from fusedce.distributed.vocab_parallel import VocabShard, vocab_parallel_cross_entropy, vocab_parallel_logprob

__all__ = [
    "ExpertParallelMoE",
    "ExpertPlan",
    "VocabShard",
    "auto_chunks",
    "choose_dispatcher",
    "clip_grad_norm_",
    "expert_parallel_moe",
    "expert_plan",
    "keep_plans",
    "new_expert_group",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_logprob",
]
