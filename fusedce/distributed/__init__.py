"""The ops over several processes: the same kernels, on a shard."""

from fusedce.distributed.clip import clip_grad_norm_
from fusedce.distributed.dispatchers import choose_dispatcher
from fusedce.distributed.expert_group import new_expert_group
from fusedce.distributed.expert_pipeline import expert_parallel_moe
from fusedce.distributed.expert_plan import ExpertPlan, auto_chunks, expert_plan
from fusedce.distributed.kept_plans import keep_plans
from fusedce.distributed.moe import ExpertParallelMoE
from fusedce.distributed.vocab_parallel import vocab_parallel_cross_entropy, vocab_parallel_logprob
from fusedce.distributed.vocab_parallel_losses import vocab_parallel_cross_entropy_heads, vocab_parallel_policy_loss
from fusedce.distributed.vocab_parallel_words import vocab_parallel_argmax, vocab_parallel_logprob_of
from fusedce.distributed.vocab_shard import VocabShard

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
    "vocab_parallel_argmax",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_cross_entropy_heads",
    "vocab_parallel_logprob",
    "vocab_parallel_logprob_of",
    "vocab_parallel_policy_loss",
]
