"""The benchmarks that run_all.py runs: of each result the commands that make it, in the order in which they run."""

from dataclasses import dataclass

RIVALS = ("triton-liger", "trl", "verl", "veomni", "mamba-ssm", "quack", "fla")
#: Of the arms that need a rival: its option, and the package in the folder that this names.
RIVALS_OF_ARMS = {
    "triton": ("triton-liger", "liger_kernel"), "fla": ("fla", "fla"), "mamba": ("mamba-ssm", "mamba_ssm"),
}  # fmt: skip
#: Operators that have their own files; {card}.json has the others.
EXPERTS = (
    "fused_experts,gated_rms_norm,xielu,attention_residuals,causal_softmax,gated_packed,mhc_pre,mhc_coefficients,"
    "mhc_post_res,neighborhood_attention,route,expert_load"
)
FEW_CLASSES = "class_logits,linear_multi_head,linear_topk_divergence"
MIXERS = "causal_conv1d,delta_gates,channel_gates"
RECURRENCES = "gated_delta_rule,channel_delta_rule"
QK = "qk_norm_rope"
APART = {QK, *",".join((EXPERTS, FEW_CLASSES, MIXERS, RECURRENCES)).split(",")} - {"fused_experts"}
OTHERS = "{others}"  # the operators that are not in APART; on a CPU all


@dataclass(frozen=True)
class Run:
    """A result, and the commands that make it: arguments of a script, each of which writes a part.

    Args:
        file: in benchmarks/results; {card} is filled in.
        script: in the repository.
        parts: the arguments; {name} stands for a rival's option, which is left out where the rival is. The operators of
            bench.py are a part each.
        minutes: the limit of each part.
        tiny: the arguments of a dry run on a CPU; none: there is no dry run.
        where: "gpu", "cpu" or both.
        gpus: how many each part needs.
        needs: rivals without which there is nothing to measure.
        writes: the file that the script writes into the folder that it is given; empty: it is given a file.
        page: the file in a part's folder that is a page, and that page.
        environment: variables.
    """

    file: str
    script: str
    parts: tuple[str, ...]
    minutes: int
    tiny: str = ""
    where: tuple[str, ...] = ("gpu",)
    gpus: int = 1
    needs: tuple[str, ...] = ()
    writes: str = ""
    page: tuple[str, str] = ("", "")
    environment: tuple[tuple[str, str], ...] = ()


BENCH, E2E, LORA, RANKS, TRL = (
    f"benchmarks/{name}.py" for name in ("bench", "e2e", "lora", "expert_parallel", "trl_steps")
)
#: These keep each row as it comes, and go on from there.
GO_ON = {BENCH, E2E, LORA, RANKS, TRL}
TINY_BENCH = "--device cpu --rivals torch --seconds 0.001 --op"
TINY_E2E = "--models tiny --arms plain,ours --lengths 32 --batch 2 --gpus 1"
TINY_LORA = "--models tiny --shapes 2x32 --checkpointing on --rounds 1 --arms plain,ours"
LONG = "--models llama-8b --checkpointing on --rounds 1"
FULL = "--gpus 1 --cap-gb 80 --profile --arms plain,triton,ours {triton-liger}"
SEGMENTS = (("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),)
CAPS = 16, 24, 40, 48  # GB, of smaller cards
MEASURED = "llama", "qwen3", "phi3", "gemma2", "gemma3_text", "qwen2_5_vl"
EXPERT_FAMILIES = "mixtral", "qwen3_moe"  # whose kernels liger's tuner still compares after minutes
#: In the order in which they run: what most pages show first.
RUNS = {
    "lora": Run("lora-{card}.json", LORA, (
        "--models llama-1b --checkpointing off --arms plain,triton,peft,ours,frozen {triton-liger}",
        "--models llama-8b --checkpointing on --rounds 1 --arms plain,triton,peft,ours,frozen {triton-liger}",
        "--models qwen3-4b --checkpointing on --rounds 1 --arms plain,triton,ours {triton-liger}",
        "--models qwen3-moe-4b --checkpointing on --rounds 1 --arms plain,peft,ours",
    ), 10, TINY_LORA),
    "lora-nf4": Run("lora-nf4-{card}.json", LORA, (
        "--models llama-8b --checkpointing on --rounds 1 --arms peft,ours --nf4",
    ), 10, TINY_LORA),
    "lora-base": Run("lora-base-{card}.json", LORA, tuple(
        f"--models {model} --checkpointing {kept} --arms ours,ours+int8,ours+fp8"
        for model, *every in (("llama-8b", "on", "off"), ("llama-1b", "on", "off"), ("qwen3-moe-4b", "on"))
        for kept in every
    ), 8, TINY_LORA + ",ours+int8"),
    "lora-plan": Run("lora-plan-{card}.json", LORA, tuple(
        f"--models {model} --checkpointing off --rounds 1 --budget 70GiB "
        "--arms plain,triton,ours,ours+plan {triton-liger}"
        for model in ("llama-8b", "qwen2.5-7b")
    ), 10, TINY_LORA + ",ours+plan", environment=SEGMENTS),
    "lora-fits": Run("lora-fits-{card}.json", LORA, tuple(
        f"--models llama-8b --checkpointing on --rounds 1 --shrink --cap-gb {cap} "
        "--arms plain,triton,ours,ours+int8,plain+nf4,triton+nf4,ours+nf4 {triton-liger}"
        for cap in CAPS
    ), 10, TINY_LORA + " --shrink --cap-gb 16", environment=SEGMENTS),
    "long": Run("long-{card}.json", LORA, (
        *(f"{LONG} --shapes {shape} --arms plain,triton,ours {{triton-liger}}" for shape in ("1x16384", "1x32768")),
        *(f"{LONG} --shapes 1x131072 --arms {arm}" for arm in ("ours", "ours+host")),
        f"{LONG} --shapes 1x262144 --arms ours+host",
    ), 15, TINY_LORA, environment=SEGMENTS),
    "families": Run("families-{card}.json", "examples/train.py", tuple(
        f"--family {family} --steps 14 --noise-steps 6" + " {triton-liger}" * (family not in EXPERT_FAMILIES)
        for family in (*MEASURED, *EXPERT_FAMILIES)
    ), 8, "--family llama --device cpu --batch 1 --length 32 --steps 9 --noise-steps 9", ("gpu", "cpu"),
        writes="train.json"),
    "cpp": Run("cpp-{card}.json", "examples/train_cpp.py", ("--steps 20 --noise-steps 6",), 10,
        "--device cpu --config tiny --batch 1 --length 32 --steps 9 --noise-steps 9", ("gpu", "cpu"),
        writes="train-cpp.json"),
    "e2e": Run("e2e-{card}.json", E2E, (
        *(f"--models llama-1b --lengths {lengths} {FULL}" for lengths in ("512,1024,2048", "4096,8192", "16384,32768")),
        *(f"--models {model} --lengths 2048,8192 {FULL}" for model in ("gemma2-2b", "llama-3b", "qwen3-1.7b")),
    ), 10, TINY_E2E),
    "e2e-x2": Run("e2e-{card}x2.json", E2E, (
        "--models llama-8b --lengths 2048 --gpus 2 --cap-gb 80 --profile --arms plain,triton,ours {triton-liger}",
    ), 10, gpus=2),
    "e2e-x4": Run("e2e-{card}x4.json", E2E, tuple(
        f"--models llama-8b --lengths {length} --batch 4 --no-shrink --gpus 4 --cap-gb 80 --budget 70GiB --profile "
        "--arms plain,triton,ours,ours+plan {triton-liger}"
        for length in (2048, 4096, 8192, 16384)
    ), 10, TINY_E2E.replace("--gpus 1", "--gpus 2 --no-shrink"), gpus=4),
    "e2e-plan-x2": Run("e2e-plan-{card}x2.json", E2E, (
        "--models llama-8b --lengths 2048 --gpus 2 --cap-gb 80 --budget 58GiB --arms plain,ours,ours+plan",
    ), 10, TINY_E2E.replace("--gpus 1", "--gpus 2") + " --arms ours+plan", gpus=2),
    "e2e-fits": Run("e2e-fits-{card}.json", E2E, tuple(
        f"--models {model} --lengths 2048 --batch 4 --gpus 1 --cap-gb {cap} --arms plain,triton,ours {{triton-liger}}"
        for model, caps in (("llama-1b", CAPS[:2]), ("llama-3b", CAPS[2:])) for cap in caps
    ), 10, TINY_E2E + " --cap-gb 16", environment=SEGMENTS),
    "e2e-moe": Run("e2e-moe-{card}.json", E2E, (
        "--models qwen3-moe-4b --lengths 2048 --gpus 1 --arms plain,triton,ours {triton-liger}",
        "--models mixtral-3b --lengths 2048 --gpus 1 --arms plain,ours",
        "--models nemotron-3-5b --lengths 2048 --gpus 1 --arms plain,mamba,ours {mamba-ssm}",
    ), 10, TINY_E2E),
    "e2e-sinks": Run("e2e-sinks-{card}.json", E2E, (
        "--models gpt-oss-4b --lengths 2048 --batch 4 --gpus 1 --no-checkpointing --arms plain,ours",
        "--models gpt-oss-4b --lengths 8192 --batch 1 --gpus 1 --no-checkpointing --arms plain,ours",
    ), 10, TINY_E2E),
    "e2e-packed": Run("e2e-packed-{card}.json", E2E, (
        "--models qwen3.5-2b --lengths 1024 --gpus 1 --no-checkpointing --arms ours,ours+packed,plain,fla {fla}",
        "--models llama-1b --lengths 2048 --gpus 1 --no-checkpointing "
        "--arms ours,ours+packed,ours+padded,plain,plain+packed,plain+padded",
        "--models llama-1b --lengths 2048 --gpus 1 --no-checkpointing "
        "--arms ours+compile,ours+compile+ones,plain+compile,plain+compile+ones",
    ), 10, TINY_E2E + " --no-checkpointing"),
    "e2e-hybrids": Run("e2e-hybrids-{card}.json", E2E, tuple(
        f"--models {model} --batch 4 --lengths 2048 --gpus 1 --no-checkpointing "
        "--arms plain,mamba,ours,ours+packed {mamba-ssm}"
        for model in ("nemotron-h-2b", "lfm2-1.2b")
    ), 10, TINY_E2E + " --no-checkpointing --arms plain,ours,ours+packed"),
    "e2e-masked": Run("e2e-masked-{card}.json", E2E, tuple(
        f"--models modernbert-base --batch {batch} --lengths {length} --gpus 1 --no-checkpointing "
        "--arms plain,plain+compile,ours,ours+compile,ours+adamw+graph"
        for batch, length in ((32, 512), (4, 8192))
    ), 10, TINY_E2E + " --no-checkpointing"),
    "e2e-small": Run("e2e-small-{card}.json", E2E, tuple(
        f"--models llama-1b --batch {batch} --lengths {length} --gpus 1 --no-checkpointing "
        "--arms plain,plain+compile,ours,ours+compile,ours+adamw+passes,ours+adamw+graph"
        for batch, length in ((1, 512), (4, 512), (8, 2048))
    ), 10, TINY_E2E + " --no-checkpointing"),
    "e2e-budget": Run("e2e-budget-{card}.json", E2E, (
        *(f"--models {model} --lengths 2048 --gpus 1 --cap-gb 80 --budget 70GiB --arms ours,ours+plan"
          for model in ("llama-1b", "llama-3b")),
        "--models llama-1b --lengths 8192 --gpus 1 --cap-gb 80 --budget 62GiB --arms ours,ours+plan",
    ), 10, TINY_E2E),
    "operators": Run("{card}.json", BENCH, (f"--op {OTHERS} {{triton-liger}}",), 10,
        f"{TINY_BENCH} rms_norm --shape 4,16", ("gpu", "cpu")),
    "quack": Run("quack-{card}.json", BENCH, ("--op rms_norm,cross_entropy,softmax --rivals quack {quack}",), 10,
        needs=("quack",)),
    "experts": Run("experts-{card}.json", BENCH, (f"--op {EXPERTS} {{triton-liger}}",), 10,
        f"{TINY_BENCH} xielu --shape 4,16"),
    "topk": Run("topk-{card}.json", BENCH, ("--op linear_topk_divergence --rivals trl {trl}",), 10, needs=("trl",)),
    "topk-tools": Run("topk-tools-{card}.json", BENCH, (f"--op {FEW_CLASSES} {{verl}} {{veomni}}",), 10,
        f"{TINY_BENCH} class_logits --shape 33,16,101"),
    "qk": Run("qk-{card}.json", BENCH, (f"--op {QK}",), 10, f"{TINY_BENCH} {QK} --shape 1,2,3,64"),
    "mixers": Run("mixers-{card}.json", BENCH, (
        f"--op {MIXERS}",
        # torch.compile unrolls the loops over chunks, for minutes.
        f"--op {RECURRENCES} --rivals torch,FLA {{fla}}",
        "--op mamba2_scan --rivals torch,mamba-ssm {mamba-ssm}",
    ), 10, f"{TINY_BENCH} causal_conv1d --shape 2,8,21"),
    "replacements": Run("replacements-{card}.json", "benchmarks/replacements.py", ("{trl}",), 5, needs=("trl",)),
    "trl": Run("trl-{card}.json", TRL, tuple(
        f"{options} --arms plain,triton,ours,ours+256MiB {{triton-liger}} {{trl}}"
        for options in ("--method dpo --models llama-8b", "--method dpo --models llama-8b --lora 16",
                        "--method grpo --models llama-1b --batch 16 --completion 1024")
    ), 10, "--models tiny --batch 2 --prompt 8 --completion 8 --steps 2 --arms plain,ours,ours+256MiB {trl}",
        needs=("trl",)),
    "eight-bit": Run("eight-bit-{card}.json", "benchmarks/eight_bit.py", ("",), 8),
    "eight-bit-products": Run("eight-bit-products-{card}.json", BENCH, ("--op scaled_matmul",), 10,
        f"{TINY_BENCH} scaled_matmul --shape 33,64,48"),
    "eight-bit-full": Run("eight-bit-full-{card}.json", "benchmarks/eight_bit_full.py", ("",), 8),
    "errors": Run("errors-{card}.json", "benchmarks/errors.py", ("--page {folder}/errors.md",), 8,
        "--device cpu --page {folder}/errors.md", ("gpu", "cpu"),
        page=("errors.md", "docs/errors-{device}.md")),
    "expert-parallel": Run("expert-parallel-{card}x2.json", RANKS, (
        *(f"--gpus 2 --layers 8 --tokens 4096,16384 --routing {routing} --arms ours,fsdp+patch,ep"
          for routing in ("balanced", "random")),
        "--gpus 2 --layers 24 --tokens 16384 --routing random --arms ours,fsdp+patch",
        "--gpus 2 --layers 8 --tokens 16384 --routing random --no-checkpointing --arms ours,fsdp+patch",
    ), 10, gpus=2),
    "expert-parallel-x4": Run("expert-parallel-{card}x4.json", RANKS, tuple(
        f"--gpus 4 --layers 24 --tokens {tokens} --routing {routing} --arms fsdp,fsdp+patch,ep,ep+patch,ours"
        for routing in ("balanced", "random") for tokens in (4096, 16384)
    ), 10, "--tiny --gpus 2 --routing balanced --arms fsdp,ours", gpus=4),
    "batch-invariance": Run("batch-invariance-{card}.json", "benchmarks/batch_invariance.py", (
        "--models tiny:llama,tiny:qwen2,tiny:qwen3,tiny:mistral,tiny:gemma2,tiny:gemma3_text,tiny:phi3",
        "--models tiny:olmo2,tiny:mixtral,tiny:qwen3_moe,tiny:gpt_oss,tiny:qwen3_next,tiny:falcon_h1",
        "--models llama-1b,qwen3-1.7b,qwen3-moe-4b --layers 4",
    ), 8, "--models tiny:llama --documents 4 --longest 24 --tokens 0"),
    "gemm-bits": Run("gemm-bits-{card}.json", "benchmarks/gemm_bits.py", ("",), 5),
}  # fmt: skip
