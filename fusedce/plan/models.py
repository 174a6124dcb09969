"""What a plan needs to know of a model: sizes and counts, from a preset. `hf_config` reads the same from a file."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2 and later): ranks and head widths."""

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True)
class Linear:
    """Gated delta rule (Qwen3.5's linear-attention layers): heads, their widths and the convolution's width."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int = 4

    @property
    def key(self) -> int:
        """Width of all keys, and of all queries."""
        return self.key_heads * self.key_dim

    @property
    def value(self) -> int:
        """Width of all values."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True)
class Model:
    """A decoder. Counts are per layer or per token; biases and norms are left out, below 0.1 % of any of these models.

    ffn: width of one expert; shared_ffn: of the expert that every token takes; dense_ffn: of the first `dense_layers`
    layers, which have no experts; sliding_layers: layers that see `window` tokens; linear_layers: layers with `linear`
    in place of attention; gated: whether attention's output is multiplied by a gate as wide as the queries.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    window: int = 0
    sliding_layers: int = 0
    linear_layers: int = 0
    linear: Linear | None = None
    latent: Latent | None = None
    gated: bool = False
    tied: bool = False
    source: str = ""

    @property
    def moe_layers(self) -> int:
        """Layers that have experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def full_layers(self) -> int:
        """Layers whose attention sees the whole sequence."""
        return self.layers - self.sliding_layers - self.linear_layers

    @property
    def query(self) -> int:
        """Width of all queries of a token."""
        return self.heads * (self.latent.nope_dim + self.latent.rope_dim if self.latent else self.head_dim)

    @property
    def value_out(self) -> int:
        """Width of attention's output before the output projection."""
        return self.heads * (self.latent.v_dim if self.latent else self.head_dim)

    @property
    def kv(self) -> int:
        """Width of all keys, and of all values, of a token, as the attention kernel reads them."""
        return self.query if self.latent else self.kv_heads * self.head_dim

    @property
    def attention_params(self) -> int:
        """Weights of one attention layer."""
        hidden, latent = self.hidden, self.latent
        if latent:
            q = hidden * latent.q_rank + latent.q_rank * self.query if latent.q_rank else hidden * self.query
            kv = hidden * (latent.kv_rank + latent.rope_dim)
            kv += latent.kv_rank * self.heads * (latent.nope_dim + latent.v_dim)
            return q + kv + self.value_out * hidden
        return hidden * (self.query * (2 if self.gated else 1) + 2 * self.kv) + self.query * hidden

    @property
    def linear_params(self) -> int:
        """Weights of one linear-attention layer: queries, keys, values, gate, two numbers a head, output."""
        part = self.linear
        if part is None:
            return 0
        wide = 2 * part.key + 2 * part.value + 2 * part.value_heads
        return self.hidden * wide + part.conv * (2 * part.key + part.value) + part.value * self.hidden

    @property
    def expert_params(self) -> int:
        """Weights of one expert: gate, up, down."""
        return 3 * self.hidden * self.ffn

    @property
    def routed_params(self) -> int:
        """Weights of all routed experts of one layer, sharded by expert parallelism."""
        return self.experts * self.expert_params

    @property
    def shared_params(self) -> int:
        """Router and shared expert of one layer, which every token takes."""
        return self.hidden * self.experts + 3 * self.hidden * self.shared_ffn

    @property
    def head_params(self) -> int:
        """The language-model head, and as many again for the embedding unless they are tied."""
        return self.vocab * self.hidden

    @property
    def mixing_params(self) -> int:
        """Weights of the attention or linear attention of all layers."""
        attention = self.layers - self.linear_layers
        return attention * self.attention_params + self.linear_layers * self.linear_params

    @property
    def dense_params(self) -> int:
        """All weights but the routed experts, embedding and head."""
        dense = self.dense_layers * 3 * self.hidden * self.dense_ffn
        return self.mixing_params + self.moe_layers * self.shared_params + dense

    @property
    def params(self) -> int:
        """All weights."""
        heads = self.head_params * (1 if self.tied else 2)
        return self.dense_params + self.moe_layers * self.routed_params + heads

    @property
    def active_params(self) -> int:
        """Weights that a token is multiplied with: the N of 6N. The embedding is a look-up and is not counted."""
        return self.dense_params + self.moe_layers * self.top_k * self.expert_params + self.head_params


_GDN = Linear(key_heads=16, value_heads=32, key_dim=128, value_dim=128)
_MLA = Latent(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
_GPT_OSS = Model(
    "gpt-oss-120b", 36, hidden=2880, heads=64, kv_heads=8, head_dim=64, vocab=201_088, experts=128, top_k=4, ffn=2880,
    window=128, sliding_layers=18, source="openai/gpt-oss: config.json",
)  # fmt: skip
MODELS = {
    model.name: model
    for model in (
        Model(
            "qwen3-30b-a3b", 48, 2048, 32, 4, 128, 151_936, 128, 8, 768, source="Qwen/Qwen3-30B-A3B: config.json"
        ),
        Model(
            "qwen3.5-35b-a3b", 40, 2048, 16, 2, 256, 248_320, 256, 8, 512, shared_ffn=512, linear_layers=30,
            linear=_GDN, gated=True, source="Qwen/Qwen3.5-35B-A3B: the defaults of transformers' text config",
        ),
        Model("mixtral-8x7b", 32, 4096, 32, 8, 128, 32_000, 8, 2, 14_336, source="mistralai/Mixtral-8x7B: config.json"),
        Model(
            "deepseek-v3-like", 61, 7168, 128, 128, 128, 129_280, 256, 8, 2048, shared_ffn=2048, dense_layers=3,
            dense_ffn=18_432, latent=_MLA, source="deepseek-ai/DeepSeek-V3: config.json, without the extra layer that "
            "predicts a second token",
        ),
        replace(_GPT_OSS, name="gpt-oss-20b", layers=24, experts=32, sliding_layers=12),
        _GPT_OSS,
    )
}  # fmt: skip
