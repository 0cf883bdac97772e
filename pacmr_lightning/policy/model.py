"""PolicyModel: a frozen base with a LoRA adapter, log-probabilities and generation."""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from lightning.pytorch.utilities import rank_zero_info
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from ..batch import LogProbs, PairBatch
from ..errors import UserError, check_at_least, check_choice, check_within, first_line, is_out_of_memory
from ..files import expanded
from ..strategies.ranks import max_over_ranks
from ..strategies.sharding import is_sharded, shape, whole
from ..waiting import waiting
from .attention import AskedLayout, AttentionPlan, check_attention, exclude_cudnn
from .base_model import compile_layers, load_base, plain_model, recompute_activations, weights_digest
from .chunked_log_probs import token_log_probs, upcast
from .lora import PLAIN_KEYS, add_lora, check_keys, check_lora
from .lora_layer import (
    ADAPTER,
    BF16,
    LoraDtype,
    PerPair,
    PolicyLora,
    UnsupportedLoraError,
    layers_with,
    weights_cast,
)
from .memory import GradientMemory, return_freed_memory
from .merged_adapters import save_with_base
from .numerics import AskedDtype, Recomputed, base_dtype, numerics, recomputes
from .positions import choose_by_row
from .quantized import AskedQuantization, check_quantization, quantized_numerics
from .selfcheck import choose_plan
from .token_layout import Rows, rows_of

OWN_KEYS = {
    "r": "set the option rank instead",
    "lora_alpha": "set the option alpha instead",
    "target_modules": "set the option target_modules, beside lora_options, instead",
    "lora_dropout": "dropout is always off; leave it out",
}
"""Keys of ``peft.LoraConfig`` that ``lora_options`` do not take, with the remedy."""

Direction = dict[str, Tensor]
"""A full-size tensor for each adapter parameter, by name."""


class PolicyAndReference(NamedTuple):
    """Response log-probabilities of N pairs under both models, and their KL, in nats."""

    policy: LogProbs
    reference: LogProbs
    token_kl: Tensor
    """(N,) KL(pi || pi_ref) of the next token, mean over both responses' positions."""
    chosen_kl: Tensor
    """(N,) the same KL, summed over the chosen response."""


class PolicyModel(nn.Module):
    """Any Hugging Face causal LM with a PEFT LoRA adapter (paper, section 5.4).

    The base is frozen and the adapter starts as the identity, so a fresh policy equals the reference: the
    base without adapter. Dropout is off, since it would drown the virtual step and the central difference.

    Args:
        model: folder or Hub id of the base model. A PEFT adapter folder is merged into its base first, so
            that the reference is one plain model.
        rank: LoRA rank.
        alpha: LoRA alpha; the adapter's output is scaled by alpha / rank.
        target_modules: names of the linear layers that get an adapter; "all-linear" means all but the head.
        lora_options: further keys of ``peft.LoraConfig``, those of ``lora.PLAIN_KEYS``.
        dtype: of the frozen base; adapters are fp32 always. "bfloat16" is for GPUs, "auto" takes it on one.
        gradient_checkpointing: recompute activations in backward, for memory. "selective" keeps the base's
            products and attention, and recomputes the rest, such as norms. "auto" recomputes on a GPU, in a
            fit only what a step needs to fit (``modules.micro_batch_finder``).
        attn_implementation: as in transformers ("sdpa", "eager", "flash_attention_2", ...), except
            "flex_attention"; "auto" is transformers' own choice (sdpa), or packed pairs (``layout``).
        layout: "shared" computes a prompt once for both responses; on a GPU with a half-precision base all
            pairs are then packed into one row without padding (``varlen_attn``), unless
            ``attn_implementation`` is set. "separate" runs one sequence a row. "auto" is "shared" with SDPA
            and eager attention, which take a mask, and else "separate". It is checked on the longest and
            shortest pairs first.
        logit_chunk: rows of logits (response tokens) that exist at a time.
        compile: run the layers through torch.compile, but in passes that take single pairs' gradients. The
            seconds that it takes are printed; torch keeps compiled code in ``TORCHINDUCTOR_CACHE_DIR``.
        quantization: "4bit" keeps the base's linear layers, but the head, in 4 bits (QLoRA: NF4 with
            quantised scales), which compute in ``dtype``; the reference is that model. Needs bitsandbytes.
        lora_compute_dtype: "base" computes LoRA's products in the base's dtype, as bf16 autocast does: less
            memory traffic under a bfloat16 base, and under a float32 base the same. "float32" is PEFT's way
            without autocast. Either way the weights, their gradients and AdamW's state are fp32, unlike with
            PEFT's ``autocast_adapter_dtype=False``.

    Raises:
        UserError: an argument is invalid, or a required package is not installed.
    """

    def __init__(
        self,
        model: str,
        rank: int = 16,
        alpha: float = 32,
        target_modules: str | list[str] = "all-linear",
        lora_options: dict[str, Any] | None = None,
        dtype: AskedDtype = "float32",
        gradient_checkpointing: Recomputed | Literal["auto"] = False,
        attn_implementation: str = "auto",
        layout: AskedLayout = "auto",
        logit_chunk: int = 512,
        compile: bool = False,
        quantization: AskedQuantization | None = None,
        lora_compute_dtype: LoraDtype = "base",
    ):
        super().__init__()
        check_within("[1, inf)", " (Qu et al.: 16)", rank=rank)
        check_within("(0, inf)", " (Qu et al.: 32)", alpha=alpha)
        check_at_least(1, logit_chunk=logit_chunk)
        check_choice(LoraDtype, lora_compute_dtype=lora_compute_dtype)
        check_choice(AskedLayout, layout=layout)
        self.dtype = base_dtype(dtype)
        check_attention(attn_implementation, layout, self.dtype)
        check_quantization(quantization)
        if quantization is not None and compile:
            raise UserError(
                "compile and quantization are both set, but no 4-bit layer has been compiled here; set one "
                "of them to its default."
            )
        if gradient_checkpointing == "selective" and compile:
            raise UserError(
                "compile and gradient_checkpointing selective are both set, but torch.compile decides itself "
                "what a layer keeps; set gradient_checkpointing to true or false."
            )
        check_keys("lora_options", lora_options, PLAIN_KEYS, OWN_KEYS, LoraConfig())
        self.lora = {
            **(lora_options or {}),
            "r": rank,
            "lora_alpha": alpha,
            "target_modules": target_modules,
            "lora_dropout": 0.0,
            "task_type": "CAUSAL_LM",
        }
        self.name: str = expanded(model)
        self.gradient_checkpointing = recomputes(gradient_checkpointing)
        self.asks_gradient_checkpointing = gradient_checkpointing == "auto"
        """True if a fit chooses."""
        self.attn_implementation = attn_implementation
        self.layout = layout
        self.logit_chunk = logit_chunk
        self.compiles = compile
        self.quantization = quantization
        self.lora_compute_dtype = lora_compute_dtype
        self.gradient_memory = GradientMemory()
        self.generates_alone: bool | None = None
        """True if a prompt's neighbours change its responses; None until there are some."""
        self.generates_cached = True
        """False once the model's own cache has failed."""
        self._digest: str | None = None
        self._plan: AttentionPlan | None = None
        self._checked = (0, 0)

    def build(self, announce: bool = True) -> None:
        """Load the base and add the adapter, once; ``announce`` prints a summary."""
        if hasattr(self, "peft"):
            return
        exclude_cudnn()
        asked = None if self.attn_implementation == "auto" else self.attn_implementation
        with waiting(f"Loading {self.name}"):
            base = load_base(self.name, self.dtype, asked, self.quantization)
        base.requires_grad_(False)
        base.config.use_cache = False
        self.peft = add_lora(base, self.lora, "lora_options", custom=True)
        check_lora(self.peft)
        # Dicts, not submodules: self.peft registers them already.
        self._adapter: dict[str, nn.Parameter] | None = None
        self._lora_layers = {
            name: layer for name, layer in self.named_modules() if isinstance(layer, LoraLayer)
        }
        self._own_layers = [layer for layer in self._lora_layers.values() if isinstance(layer, PolicyLora)]
        if self.lora_compute_dtype == "base" and self.dtype == BF16:
            for layer in self._own_layers:
                layer.compute_dtype = BF16
            if len(self._own_layers) < len(self._lora_layers):
                rank_zero_info(
                    "LoRA on experts' parameters computes in float32; lora_compute_dtype base is for linear "
                    "layers."
                )
        if (plain := plain_model(self.name)) != self.name:
            self.peft.save_pretrained = partial(  # type: ignore[method-assign]
                save_with_base, self.peft, self.name, plain
            )
        if self.asks_gradient_checkpointing and not self.model.supports_gradient_checkpointing:
            self.gradient_checkpointing = self.asks_gradient_checkpointing = False
        self._length_limit = choose_by_row(self.model, self.model.config)
        if self.gradient_checkpointing:
            recompute_activations(self.model, self.gradient_checkpointing)
        if self.compiles:
            compile_layers(self.model)
        self.train()
        if announce:
            trained = sum(parameter.numel() for parameter in self.adapter().values())
            # A 4-bit weight has half as many bytes as parameters, one under ZeRO-3 none here.
            total = base.num_parameters() + sum(shape(p).numel() - p.numel() for p in base.parameters())
            rank_zero_info(
                f"Reference: {self.name} without adapter; policy: the same with LoRA r={self.lora['r']}, "
                f"{trained:,} trained of {total:,} parameters."
            )

    def recompute(self, recomputed: Recomputed) -> None:
        """Recompute activations in backward from now on, or keep them."""
        if recomputed != self.gradient_checkpointing:
            recompute_activations(self.model, recomputed)
            self.gradient_checkpointing = recomputed

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model with LoRA layers."""
        return cast("PreTrainedModel", self.peft.get_base_model())

    @property
    def device(self) -> torch.device:
        """The adapter's device, or the base's if nothing is adapted."""
        return next(iter(self.adapter().values()), next(self.parameters())).device

    @property
    def is_trained(self) -> bool:
        """True if a B of LoRA, all of which are zero until they are trained, is not."""
        b = [p for name, p in self.adapter().items() if ".lora_B." in name]
        with whole(b):
            return any(bool(p.any()) for p in b)

    @property
    def is_sharded(self) -> bool:
        """True under ZeRO-3, where a forward pass needs all ranks."""
        return is_sharded(next(self.parameters()))

    def _apply(self, *args: Any, **options: Any) -> Any:
        """As torch's; a move to some devices makes new parameters."""
        self._adapter = None
        return super()._apply(*args, **options)

    def adapter(self) -> dict[str, nn.Parameter]:
        """The trainable parameters omega by name."""
        if self._adapter is None:
            self._adapter = {name: p for name, p in self.named_parameters() if p.requires_grad}
        return self._adapter

    def lora_layers(self) -> dict[tuple[str, str], PolicyLora]:
        """The adapter's layers by the names of A and B; raises UnsupportedLoraError for one on experts."""
        layers = {name: x for name, x in self._lora_layers.items() if isinstance(x, PolicyLora)}
        if others := self._lora_layers.keys() - layers.keys():  # those of PEFT that ``check_lora`` takes
            linears = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
            raise UnsupportedLoraError(
                f"The LoRA layer {min(others)} is on a parameter of a mixture of experts, for which neither "
                "single pairs' gradients nor the virtual step are computed; set the policy's target_modules "
                f"to {f'[{linears}]' if linears else 'the names of linear layers'}."
            )
        a, b = (f"lora_{part}.{ADAPTER}.weight" for part in "AB")
        return {(f"{name}.{a}", f"{name}.{b}"): layer for name, layer in layers.items()}

    def lora_in_float32(self) -> AbstractContextManager[None]:
        """Compute LoRA as with ``lora_compute_dtype`` float32 inside."""
        return layers_with("compute_dtype", dict.fromkeys(self._own_layers))

    def reference(self) -> AbstractContextManager[None]:
        """Use the reference inside: the adapter is off."""
        # As peft's disable_adapter, without its walk through all modules and parameters.
        return layers_with("_disable_adapters", dict.fromkeys(self._lora_layers.values(), True))

    def zeros(self) -> Direction:
        """Return the direction 0."""
        shapes = {name: shape(p) for name, p in self.adapter().items()}
        sizes = [size.numel() for size in shapes.values()]
        parts = next(iter(self.adapter().values())).new_zeros(sum(sizes)).split(sizes)
        return {name: part.view(size) for (name, size), part in zip(shapes.items(), parts, strict=True)}

    def add_gradient(self, total: Direction, loss: Tensor) -> None:
        """Add a loss's gradient to ``total``, this rank's sum from ``zeros``; frees the loss's graph."""
        # Not backward(), to leave ``p.grad`` and wrappers (DDP, DeepSpeed) alone.
        gradients = torch.autograd.grad(loss, list(self.adapter().values()))
        # _foreach_ saves hundreds of kernel launches.
        torch._foreach_add_(list(total.values()), gradients)

    @contextmanager
    def forgets_outputs(self) -> Iterator[None]:
        """Forget outputs that layers have computed for others, in case that a pass inside ends early."""
        try:
            yield
        finally:
            for layer in self._own_layers:
                layer.waiting = None, None

    def shifted(self, direction: Direction, scale: float) -> AbstractContextManager[None]:
        """Run at omega + scale D inside, as in the virtual step; the parameters are not written.

        Gradients are those at the shifted point. With activation checkpointing backward must run inside too.
        The reference is not shifted. Raises UnsupportedLoraError for LoRA layers on a mixture's experts.

        Args:
            direction: D, the same on every rank.
            scale: length of the step along D.
        """
        layers = self.lora_layers()
        assert not any(layer.shift for layer in layers.values()), "a shift inside a shift"
        steps = {x: (scale * direction[a], scale * direction[b]) for (a, b), x in layers.items()}
        return layers_with("shift", steps)

    @contextmanager
    def single_gradients(self, rows: Rows, direction: Direction | None = None) -> Iterator[Direction]:
        """Yield leaves of the graph of a pass over N pairs inside, whose gradients are single pairs'.

        They are (N, ...) by adapter parameter; with a ``direction`` D, (N,) e with which pair i is at
        omega + e_i D. Raises UnsupportedLoraError if a LoRA layer does not see whole rows.
        """
        sizes = {name: shape(p) for name, p in self.adapter().items()} if direction is None else {"e": ()}
        zero = next(iter(self.adapter().values())).new_zeros(())
        leaves = {name: zero.expand(rows.pairs, *size).requires_grad_() for name, size in sizes.items()}
        per_pair = {}
        for names, layer in self.lora_layers().items():
            own = [leaves[name] for name in names] if direction is None else [leaves["e"]]
            along = [] if direction is None else [direction[name] for name in names]
            per_pair[layer] = PerPair(rows, own, along)
        with layers_with("per_pair", per_pair):
            yield leaves

    def keeps_gradients(self, pairs: int) -> bool:
        """Return whether there is memory for each pair's gradient; never under ZeRO-3."""
        needed = 4 * pairs * sum(parameter.numel() for parameter in self.adapter().values())
        return not self.is_sharded and self.gradient_memory.fits(needed, self.device)

    def reference_digest(self) -> str:
        """Return the cached hash of the reference's frozen weights."""
        if self._digest is None:
            with waiting("Hashing the reference's weights"):
                self._digest = weights_digest(self.model)
        return self._digest

    def adapter_digest(self) -> str:
        """Return a hash of the adapter's parameters."""
        digest = hashlib.sha256()
        for name, parameter in sorted(self.adapter().items()):
            digest.update(name.encode() + parameter.detach().cpu().numpy().tobytes())
        return digest.hexdigest()

    def in_step(self, parts: Iterable[PairBatch], filler: PairBatch) -> Iterator[tuple[PairBatch, bool]]:
        """Yield this rank's micro-batches and True; under ZeRO-3, then ``filler`` and False until all end."""
        parts = list(parts)
        rounds = len(parts)
        if self.is_sharded:
            rounds = max_over_ranks(rounds, filler.input_ids.device)
        yield from ((part, True) for part in parts)
        yield from ((filler, False) for _ in range(rounds - len(parts)))

    def rows(self, batch: PairBatch) -> Rows:
        """Lay out the batch as the self-check chose."""
        return rows_of(self._plan_for(batch).layout, batch)

    def log_probs(self, batch: PairBatch, rows: Rows | None = None) -> LogProbs:
        """Return (N,) summed response log-probabilities, in nats."""
        return self.score(self.rows(batch) if rows is None else rows)

    def score(self, rows: Rows) -> LogProbs:
        """Return summed response log-probabilities of laid-out pairs, adapter on or off."""
        states, head = self._predictions(rows)
        head_weights = self.model.get_output_embeddings().parameters()
        frozen = not rows.whole_logits and not any(weight.requires_grad for weight in head_weights)
        return rows.log_probs(token_log_probs(states, head, rows.targets, self._pieces(rows), frozen))

    @torch.no_grad()
    def reference_log_probs(self, batch: PairBatch, rows: Rows | None = None) -> LogProbs:
        """Return the batch's cached values, or compute them with the adapter off."""
        if batch.reference is not None:
            return batch.reference
        with self.reference():
            return self.log_probs(batch, rows)

    @torch.no_grad()
    def judged(self, batch: PairBatch) -> PolicyAndReference:
        """Return log-probabilities of N pairs under policy and reference, and their KL."""
        rows = self.rows(batch)
        states, head = self._predictions(rows)
        with self.reference():
            states_reference, _ = self._predictions(rows)
        parts, pieces = [], self._pieces(rows)
        for h, h_reference, target in zip(
            *(x.tensor_split(pieces) for x in (states, states_reference, rows.targets)), strict=True
        ):
            log_p = upcast(head(h)).log_softmax(1)
            with self.reference():
                log_q = upcast(head(h_reference)).log_softmax(1)
            chosen = (log.gather(1, target[:, None])[:, 0] for log in (log_p, log_q))
            parts.append(torch.stack([*chosen, (log_p.exp() * (log_p - log_q)).sum(1)]))
        tokens_p, tokens_q, tokens_kl = torch.cat(parts, dim=1)
        pair = rows.owner % rows.pairs
        sums = tokens_kl.new_zeros(rows.pairs).index_add(0, pair, tokens_kl)
        return PolicyAndReference(
            rows.log_probs(tokens_p),
            rows.log_probs(tokens_q),
            sums / torch.bincount(pair, minlength=rows.pairs),
            rows.log_probs(tokens_kl).chosen,
        )

    @torch.no_grad()
    def response_states(self, rows: Rows) -> Tensor:
        """Return (N, 2, H) fp32 states of chosen and rejected responses, adapter on or off.

        A state is the middle layer's mean over the positions that predict the response; no later layer runs.
        """
        states = middle_states(self.model, self._inputs(rows), stop=not self.is_sharded)
        middle = states[rows.source].float()
        count = 2 * rows.pairs
        sums = middle.new_zeros(count, middle.shape[1]).index_add(0, rows.owner, middle)
        means = sums / torch.bincount(rows.owner, minlength=count)[:, None]
        return means.view(2, rows.pairs, -1).transpose(0, 1)

    def reference_states(self, batch: PairBatch) -> Tensor:
        """``response_states`` of the reference."""
        rows = self.rows(batch)
        with self.reference():
            return self.response_states(rows)

    def _predictions(self, rows: Rows) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """(K, H) states that predict the response tokens, and the function from states to logits."""
        with self._weights_cast():
            if rows.whole_logits:
                return self.model(**self._inputs(rows)).logits[rows.source], nn.Identity()
            states = self.model.base_model(**self._inputs(rows)).last_hidden_state[rows.source]
            return states, self.model.get_output_embeddings()

    def _weights_cast(self) -> AbstractContextManager[None]:
        lead = next(iter(self._own_layers), None)
        # A layer that is recomputed, after the pass, must do what it did.
        if lead is None or self.gradient_checkpointing or self.is_sharded:
            return nullcontext()
        if not lead.enabled or lead.shift is not None or lead.compute_dtype is None:
            return nullcontext()
        return layers_with("casts", weights_cast(self._own_layers))

    def _inputs(self, rows: Rows) -> dict[str, Any]:
        inputs = rows.attention_inputs(self.model.config, self.model.dtype)
        # Rotary frequencies by row need a row's own positions.
        if self._length_limit is not None or not rows.whole_logits:
            inputs["position_ids"] = rows.position_ids
        return inputs | {"input_ids": rows.input_ids, "use_cache": False}

    def _pieces(self, rows: Rows) -> int:
        pieces = -(-len(rows.targets) // self.logit_chunk)
        return max_over_ranks(pieces, rows.targets.device) if self.is_sharded else pieces

    def check(self, pairs: PairBatch) -> None:
        """Choose attention and layout by the self-check of these pairs, unless longer ones have been checked.

        On all processes alike: the longest and the shortest pairs of a run, before their values are computed.
        """
        if self.compiles and self.is_sharded:
            raise UserError(
                "ZeRO-3 gathers parameters through hooks, with which no layer is compiled; set compile "
                "to false, or use a lower stage."
            )
        row, sequence = pairs.lengths.amax(0).tolist()
        if row <= self._checked[0] and sequence <= self._checked[1]:
            return
        self._checked = max(row, self._checked[0]), max(sequence, self._checked[1])
        start = time.monotonic()
        with waiting("Compiling the layers") if self.compiles else nullcontext():
            self._plan = choose_plan(
                self.model, self.attn_implementation, self.layout, pairs, self.score, self.compiles
            )
        if self.compiles:
            seconds = time.monotonic() - start
            rank_zero_info(f"The layers were compiled, and checked on these pairs, in {seconds:.0f} s.")

    def _plan_for(self, batch: PairBatch) -> AttentionPlan:
        # A loop of one's own may not call ``check``. Processes differ in their batches, so that after the
        # first they could not check together.
        if self._plan is None or not torch.distributed.is_initialized():
            self.check(batch[:1] if self.is_sharded else batch)
        assert self._plan is not None
        return self._plan

    def log_prob_options(self) -> dict[str, Any]:
        """Return what log-probabilities depend on besides weights and tokens, after a ``check``."""
        plan = self._plan
        assert plan is not None, "pairs are checked before their values are computed"
        config = self.model.config.to_dict()
        # These do not change log-probabilities.
        ignored = ("_name_or_path", "transformers_version", "use_cache")
        return {
            "layout": plan.layout,
            "dtype": str(self.dtype),
            "attention": plan.attention,
            "compile": self.compiles,
            **quantized_numerics(self.quantization),
            **numerics(self.device),
            "config": {name: config[name] for name in sorted(config) if name not in ignored},
        }

    @torch.no_grad()
    def generate(self, **options: Any) -> Any:
        """Generate with transformers; returns prompt and continuation, or what ``options`` ask for.

        Of the model's ``generation_config`` only special tokens apply.
        """
        was_training, own = self.training, self.model.generation_config
        special = {name: getattr(own, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        if self.model.device.type == "cpu":
            return_freed_memory()
        self.eval()
        self.model.generation_config = GenerationConfig(**special)
        length = options["input_ids"].shape[1] + options["max_new_tokens"]
        # Cached keys would keep the frequencies of a shorter sequence.
        use_cache = self._length_limit is None or length <= self._length_limit
        try:
            if use_cache and self.generates_cached:
                try:
                    return self.peft.generate(**options, use_cache=True)
                except (ValueError, RuntimeError, TypeError, IndexError, AttributeError) as error:
                    if is_out_of_memory(error):
                        raise
                    self.generates_cached = False
                    rank_zero_info(
                        f"{self.name} does not generate from its cache ({first_line(error)}), so it computes "
                        "each token from the whole text."
                    )
            return self.peft.generate(**options, use_cache=False)
        finally:
            self.model.generation_config = own
            self.train(was_training)


class _Enough(Exception):
    """Ends a forward pass, with a layer's output."""


def _end(_: nn.Module, __: Any, output: Any) -> None:
    raise _Enough(output)


def middle_states(model: PreTrainedModel, inputs: dict[str, Any], stop: bool = True) -> Tensor:
    """Return (B, L, H) states after half of the layers, rounded up; Gemma 3n's four streams side by side.

    ``stop`` false runs all layers, as does a model whose layers are no plain list.
    """
    number = model.config.get_text_config().num_hidden_layers
    half = (number + 1) // 2
    lists = [m for m in model.base_model.modules() if isinstance(m, nn.ModuleList) and len(m) == number]
    if not stop or len(lists) != 1 or half == number:
        output = model.base_model(**inputs, output_hidden_states=True).hidden_states[half]
    else:
        try:
            with lists[0][half - 1].register_forward_hook(_end):
                model.base_model(**inputs)
        except _Enough as enough:
            (output,) = enough.args
    states = output[0] if isinstance(output, (tuple, list)) else output
    return (states if states.ndim == 3 else states.movedim(0, 2)).flatten(2)
