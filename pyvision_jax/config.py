"""Run configuration: frozen dataclasses, one per part. `config_load` fills them, `config_check` checks the arithmetic.

A field with a fixed set of values spells them as a `Literal`; a type checker and the loader read the same line.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

KeptEnd = Literal[
    "answered", "over_length", "over_turns", "over_images", "tool_error", "tool_timeout", "repetition", "malformed"
]  # rollout.trajectory.EndReason, without `infrastructure`: that one never trains


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; one of them may be -1 (whatever is left)."""

    data: int = 1
    fsdp: int = -1
    tensor: int = 1


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    lr: float = 1e-6
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = 0
    final_lr_ratio: float = 0.1  # of lr, at the end of a cosine or linear schedule
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    freeze: tuple[Literal["vision", "merger", "text"], ...] = ()  # top-level parts of the parameter tree


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    path: str = ""  # directory in HF layout (config, safetensors, tokenizer, preprocessor); "": built from `config`
    config: dict[str, Any] = dataclasses.field(default_factory=dict)  # HF config.json as a mapping, if no `path`
    tokenizer: str = ""  # defaults to `path`
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the computation
    remat: Literal["none", "block"] = "none"


@dataclasses.dataclass(frozen=True)
class ImageConfig:
    min_pixels: int = 3_136
    max_pixels: int = 2_000_000
    max_aspect: float = 200.0  # longer pictures are refused with a reason
    background: tuple[int, int, int] = (255, 255, 255)  # alpha is composited on it


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    temperature: float = 1.0
    code_temperature: float | None = None  # None: as `temperature`; 0 is Thyme's adaptive temperature
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # share of the most likely id's probability; 0: off
    repetition_penalty: float = 1.0  # on ids of the context, as in HF and vLLM; 1: off
    top_entropy: int = 0  # record the entropy that so many most likely ids hold; 0: off

    @property
    def filtered(self) -> bool:
        """Whether what is sampled from is not the softmax of the logits at the temperature."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or self.repetition_penalty != 1


@dataclasses.dataclass(frozen=True)
class RepetitionConfig:
    """Early stop of a policy turn that repeats itself (rollout/repetition.py)."""

    rule: Literal["off", "fixed_length", "any_length"] = "off"  # any_length: Thyme's released rule
    length: int = 32  # ids of the repeated piece, for fixed_length
    share: float = 0.5  # of the ids looked at that its copies must exceed
    tail: int = 1_024  # the last ids of the turn that are looked at; 0: all
    minimum: int = 128  # a shorter turn is never stopped


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    slots: int = 64  # trajectories decoded together
    max_length: int = 4_096  # ids of a whole trajectory: prompt, turns and observations
    max_turn_length: int = 1_024  # ids of one policy turn
    chunk: int = 16  # decode steps between two looks of the host
    prefill_buckets: tuple[int, ...] = (64, 256, 1_024, 4_096)  # new tokens of one row in a prefill or extend program
    patch_buckets: tuple[int, ...] = (64, 256, 1_024, 4_096, 16_384)  # patches of one picture in the vision program
    seed: int = 0
    repetition: RepetitionConfig = RepetitionConfig()


@dataclasses.dataclass(frozen=True)
class ProtocolConfig:
    name: str = "pyvision_image"
    template: Literal["image", "brief"] = "image"  # first user turn (agents/prompts.py)
    max_calls: int = 4  # tool calls; the answer turn comes on top
    max_images: int = 32  # pictures in context, the input ones included
    error_policy: Literal["feed_back", "stop"] = "feed_back"
    close_turn: bool = True  # put <|im_end|> after </code> before the observation (the released form does not)
    bind_figures: bool = False  # returned figures become variables image_clue_k
    max_text: int = 4_000  # characters of tool text in one observation
    tool: Literal["on", "off"] = "on"  # `off` answers every call with a fixed refusal
    force_answer: bool = False  # prompt ends with the opening of the answer tag (no-tool control)


@dataclasses.dataclass(frozen=True)
class SandboxConfig:
    """`min_level` has no `none`: code that a policy sampled never runs unconfined (docs/sandbox.md)."""

    profile: Literal["numpy_pil", "vision", "full"] = "vision"  # what a session sees and has imported: docs/sandbox.md
    workers: int = 0  # sessions that may run code at the same time; 0: as many as this process has cores
    cell_timeout: float = 10.0  # seconds of wall time for one call
    memory_mb: int = 1_024
    max_text: int = 64_000
    max_images: int = 16
    min_level: Literal["seccomp", "landlock", "namespaces"] = "landlock"  # seccomp: trusted replay only


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    tool_bonus: float = 0.1
    bonus_form: Literal["per_call", "once", "off"] = "per_call"  # always only if the answer is right


@dataclasses.dataclass(frozen=True)
class SelectionConfig:
    """Filters run in the order of the fields; ranking keeps the groups of highest reward std."""

    zero_variance: bool = True
    variance_of: Literal["total", "accuracy"] = "total"
    end_reasons: tuple[KeptEnd, ...] = ("answered", "over_turns", "malformed", "tool_error")  # kept
    require_tool_image: bool = False
    image_mismatch: bool = True
    max_tokens: int = 0  # 0: off
    rank_by_std: bool = True


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig:
    group_size: int = 8
    prompts: int = 16  # groups trained on in a step
    oversample: float = 2.0  # groups drawn in a step, as a multiple of `prompts`
    minibatches: int = 1  # optimizer updates a step
    normalize_std: bool = False
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0  # 0: off
    loss_aggregation: Literal["token_mean", "seq_mean_token_mean", "group_token_mean"] = "token_mean"
    kl_coef: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy_coef: float = 0.0


@dataclasses.dataclass(frozen=True)
class PackingConfig:
    row_length: int = 4_096
    rows: int = 8  # rows of one micro-batch
    images: int = 0  # picture slots of one micro-batch; 0: grow in powers of two


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every: int = 100  # steps; the last step is always saved
    keep: int = 2


@dataclasses.dataclass(frozen=True)
class DataConfig:
    train: str = ""  # JSONL of records, or "needle" for the generated world
    eval: str = ""
    shuffle_seed: int = 0
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # arguments of a generated world


@dataclasses.dataclass(frozen=True)
class SFTConfig:
    """`pyvision sft`."""

    run_dir: str = "runs/sft"
    seed: int = 0
    steps: int = 100
    batch_size: int = 64  # traces a step
    model: ModelConfig = ModelConfig()
    mesh: MeshConfig = MeshConfig()
    image: ImageConfig = ImageConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    packing: PackingConfig = PackingConfig()
    protocol: ProtocolConfig = ProtocolConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log_every: int = 1


@dataclasses.dataclass(frozen=True)
class RLConfig:
    """`pyvision rl`."""

    run_dir: str = "runs/rl"
    seed: int = 0
    steps: int = 100
    model: ModelConfig = ModelConfig()
    mesh: MeshConfig = MeshConfig()
    image: ImageConfig = ImageConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    packing: PackingConfig = PackingConfig()
    protocol: ProtocolConfig = ProtocolConfig()
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    sandbox: SandboxConfig = SandboxConfig()
    reward: RewardConfig = RewardConfig()
    selection: SelectionConfig = SelectionConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    save_trajectories: bool = True


@dataclasses.dataclass(frozen=True)
class DemoConfig:
    """`pyvision demo`. Models, data and run directories of the stages are the demo's own."""

    run_dir: str = "runs/demo"
    seed: int = 0
    eval_tasks: int = 256  # held out; half on photographs never trained on
    from_scratch: bool = False  # warm vision up here, not from the checkpoint in the package
    warmup_steps: int = 1_800
    sft: SFTConfig = SFTConfig()
    rl: RLConfig = RLConfig()
