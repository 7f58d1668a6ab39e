"""Llama and the families that share its block: separate projections, rotary embedding, gated MLP or experts."""

from dataclasses import replace

from .spec import LLAMA_4_GROWTH, Architecture, AttentionSpec, ByConfig, ExpertsSpec, MLPSpec, NormsSpec, mixer

LLAMA = Architecture(
    model_type="llama",
    blocks="model.layers",
    attention=AttentionSpec(path="self_attn", qkv=("q_proj", "k_proj", "v_proj"), output="o_proj"),
    mlp=MLPSpec(gate="mlp.gate_proj", up="mlp.up_proj", down="mlp.down_proj", activation="mlp.act_fn"),
    norms=NormsSpec(),
)
STATE = "it has a state in place of keys and values"
MAMBA = mixer("mamba", STATE)
GPTJ_ROPE = replace(LLAMA.attention, rope_style="gptj")
GRANITE = replace(LLAMA, model_type="granite", is_plain_residual=False)  # a factor stands behind each half of its block
GRANITE_EXPERTS = ExpertsSpec(path="block_sparse_moe.experts", width="intermediate_size")
GRANITE_SHARED = MLPSpec(
    up="shared_mlp.input_linear",
    down="shared_mlp.output_linear",
    fused_gate=True,
    width="shared_intermediate_size",
    activation="shared_mlp.activation",
)

ARCHITECTURES = (
    LLAMA,
    replace(LLAMA, model_type="mistral"),
    replace(LLAMA, model_type="ministral3", attention=replace(LLAMA.attention, growth=LLAMA_4_GROWTH)),
    replace(LLAMA, model_type="mixtral", mlp=None, experts=ExpertsSpec(width="intermediate_size")),
    replace(LLAMA, model_type="seed_oss", attention=replace(LLAMA.attention, output_dropout="residual_dropout")),
    replace(LLAMA, model_type="smollm3", attention=replace(LLAMA.attention, applies_rope="use_rope")),
    replace(LLAMA, model_type="ernie4_5", attention=GPTJ_ROPE),
    replace(LLAMA, model_type="helium", attention=replace(GPTJ_ROPE, width=None)),  # its output projection is square
    GRANITE,
    replace(GRANITE, model_type="granitemoe", mlp=None, experts=GRANITE_EXPERTS),
    replace(  # Mamba 2 in most blocks
        GRANITE,
        model_type="granitemoehybrid",
        attention=replace(
            LLAMA.attention, position=ByConfig("position_embedding_type", yes="rope", no="none", value="rope")
        ),
        mixers=(MAMBA,),
        mlp=GRANITE_SHARED,
        experts=replace(GRANITE_EXPERTS, shared=GRANITE_SHARED),
        norms=None,
    ),
    replace(  # part of a head rotates; parallel by config
        LLAMA,
        model_type="stablelm",
        attention=replace(LLAMA.attention, width=None),
        middle=ByConfig("use_parallel_residual", yes=None, no="post_attention_layernorm"),
        norms=NormsSpec(mlp=("post_attention_layernorm", "input_layernorm"), is_layernorm=True),
        unless=(("qk_layernorm", "its q/k-norms have weights of their own for every head"),),
    ),
)
