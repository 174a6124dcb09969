"""The ops over several processes: the same kernels, on a shard."""

from fusedce.distributed.dispatchers import choose_dispatcher
from fusedce.distributed.expert_pipeline import expert_parallel_moe
from fusedce.distributed.expert_plan import ExpertPlan, auto_chunks, expert_plan
from fusedce.distributed.vocab_parallel import VocabShard, vocab_parallel_cross_entropy, vocab_parallel_logprob

__all__ = [
    "ExpertPlan",
    "VocabShard",
    "auto_chunks",
    "choose_dispatcher",
    "expert_parallel_moe",
    "expert_plan",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_logprob",
]
