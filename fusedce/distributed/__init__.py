"""The ops over several processes: the same kernels, on a shard."""

from fusedce.distributed.vocab_parallel import VocabShard, vocab_parallel_cross_entropy, vocab_parallel_logprob

__all__ = ["VocabShard", "vocab_parallel_cross_entropy", "vocab_parallel_logprob"]
