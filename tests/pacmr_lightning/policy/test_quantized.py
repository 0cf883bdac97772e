"""A base in 4 bits: the method on it equals the method on the model that it stands for, written out."""

import json
import re
import shutil

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from pacmr_lightning import cli
from pacmr_lightning.errors import UserError
from pacmr_lightning.meta_gradient import CentralDifference, GhostDotProduct
from pacmr_lightning.meta_gradient.step_pairs import StepPairs
from pacmr_lightning.objectives import DPO
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.policy import quantized as module
from pacmr_lightning.strategies import LoraDeepSpeedStrategy, check_strategy

from ..meta_gradient.test_step_pairs import BETA, alone

# Rows of whole blocks: others are refused on CPUs.
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


@pytest.fixture(scope="module")
def bnb():
    reason = "bitsandbytes, the extra quantization, is not installed"
    return pytest.importorskip("bitsandbytes", reason=reason)


def packed_layers(model, bnb):
    return {n: layer for n, layer in model.named_modules() if isinstance(layer, bnb.nn.Linear4bit)}


def unpack(layer, bnb):
    """(out, in) weights in float64, from codes and scales by the definition of NF4 with quantised scales."""
    state = layer.weight.quant_state
    scales = state.state2.absmax.repeat_interleave(256)[: len(state.absmax)]
    scales = (state.state2.code[state.absmax.long()] * scales + state.offset).double()
    codes = layer.weight.flatten()
    codes = torch.stack([codes >> 4, codes & 15], 1).flatten().long()
    values = state.code.double()[codes] * scales.repeat_interleave(64)[: len(codes)]
    return values.view(state.shape)


@pytest.fixture
def both(bnb, make_policy):
    """A moved policy on a 4-bit base, and the same in float64 on the weights that those bits mean."""

    def make(name="llama", **options):
        changes = {"n_embd": 64} if name == "gpt2" else WIDE
        policy = make_policy(name, changes=changes, quantization="4bit", **options)
        # The judge's attention is the default: transformers' eager softmax is in fp32 for any dtype.
        own = ("dtype", "attn_implementation")
        exact_options = {name: v for name, v in options.items() if name not in own}
        exact = make_policy(name, double=True, changes=changes, **exact_options)
        packed = packed_layers(policy.model, bnb)
        values = {f"{name}.weight": unpack(layer, bnb) for name, layer in packed.items()}
        if name == "gpt2":  # its Conv1D has its weights the other way round
            values = {key: value.T for key, value in values.items()}
        assert len(packed) == (8 if name == "gpt2" else 14) and not any("lm_head" in key for key in packed)
        plain = dict(policy.model.named_parameters())
        with torch.no_grad():
            for key, p in exact.model.named_parameters():
                value = values.get(key, plain[key])
                if key in values:
                    assert 0.02 < (value - p).norm() / p.norm() < 0.2, "rounded, but the layer's own"
                p.copy_(value)
        return policy, exact

    return make


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"layout": "shared"}, 5e-5),
        ({"layout": "shared", "name": "gpt2"}, 5e-5),
        ({"layout": "shared", "attn_implementation": "eager"}, 5e-5),
        ({"layout": "separate", "gradient_checkpointing": True}, 5e-5),
        ({"layout": "separate"}, 5e-5),
        # Of 60 nats; the same weights without bits, in bf16, are off by 0.12.
        ({"layout": "shared", "dtype": "bfloat16"}, 0.2),
    ],
)
def test_log_probs_are_those_of_the_weights_that_the_bits_mean(options, tolerance, both, make_batch):
    policy, exact = both(**options)
    batch = make_batch()
    assert policy._plan_for(batch).layout == options["layout"], "the self-check passes with what was asked"
    for ask in ("log_probs", "reference_log_probs"):
        with torch.no_grad():
            found, truth = getattr(policy, ask)(batch), getattr(exact, ask)(batch)
        torch.testing.assert_close(vars(found), vars(truth), atol=tolerance, rtol=0, check_dtype=False)
    with torch.no_grad():
        moved = (policy.log_probs(batch).chosen - policy.reference_log_probs(batch).chosen).abs()
    assert float(moved.min()) > 0.01, "the adapter says something"


def test_the_estimators_give_the_float64_model_s_coefficients(both, make_batch):
    """c_i pair by pair; after a pass in eval mode too, which would repack the weights on some CPUs."""
    policy, exact = both(gradient_checkpointing=True)
    policy.eval()
    with torch.no_grad():
        policy.log_probs(make_batch())
    policy.train()
    torch.manual_seed(3)
    direction = {name: torch.randn_like(p) for name, p in policy.adapter().items()}
    batch = make_batch(6)
    own, batch = (batch.with_reference(each.reference_log_probs(batch)) for each in (policy, exact))
    gradients = (zip(alone(exact, batch, i), direction.values(), strict=True) for i in range(6))
    truth = torch.stack([sum((g * d).sum() for g, d in each) for each in gradients])
    assert float(truth.abs().min()) > 1e-3
    pairs = StepPairs(policy, DPO(BETA), own, 4, keep="auto")
    for estimator, tolerance in ((GhostDotProduct(), 5e-5), (CentralDifference(0.05, relative=True), 5e-3)):
        found = estimator.coefficients(pairs, direction).double()
        # Pair by pair; a central difference's step leaves 7e-4 in float64 too.
        torch.testing.assert_close(found, truth, rtol=tolerance, atol=0, msg=type(estimator).__name__)


def test_without_the_package(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs bitsandbytes; install it: pip install"):
        PolicyModel("anything", quantization="4bit")


def test_what_is_refused(bnb, save_model, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    for model, options, said in (
        (save_model("llama"), {}, "a layer of 32 inputs, no multiple of 64"),
        ("anything", {"quantization": "8bit"}, "quantization is 8bit"),
        ("anything", {"compile": True}, "compile and quantization"),
        (str(tmp_path), {}, "is an adapter, which would be rounded"),
    ):
        with pytest.raises(UserError, match=said):
            PolicyModel(model, **{"quantization": "4bit", **options}).build()
    for stage in (1, 2, 3):
        with pytest.raises(UserError, match="no stage of DeepSpeed"):
            check_strategy(LoraDeepSpeedStrategy(stage=stage), "4bit")
        check_strategy(LoraDeepSpeedStrategy(stage=stage))


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")  # the model's is the same
def test_a_model_that_is_stored_in_4_bits(bnb, save_model, tmp_path):
    policy = PolicyModel(save_model("llama", **WIDE), rank=4, dtype="bfloat16", quantization="4bit")
    policy.build()
    policy.peft.unload().save_pretrained(tmp_path / "stored")
    stored = PolicyModel(str(tmp_path / "stored"), rank=4, quantization="4bit")
    stored.build()
    for layer in packed_layers(stored.model, bnb).values():
        assert layer.compute_dtype == layer.weight.quant_state.dtype == torch.float32
    with pytest.raises(UserError, match="is stored in 4 bits; set quantization to 4bit"):
        PolicyModel(str(tmp_path / "stored")).build()
    # Adapters of such bases, as unsloth leaves them, would be rounded away.
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "stored"), config)
    adapted.save_pretrained(tmp_path / "adapter")
    said = r"adapter was trained on .*stored, which is stored in 4 bits.*in full"
    with pytest.raises(UserError, match=said):
        PolicyModel(str(tmp_path / "adapter")).build()


@pytest.fixture(scope="module")
def model(bnb, tmp_path_factory, tiny_llama):
    options = {"num_attention_heads": 4, "initializer_range": 0.2, "max_position_embeddings": 512}
    return tiny_llama(tmp_path_factory.mktemp("model"), **WIDE, **options)


@pytest.fixture(scope="module")
def fit(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    words = """
        fit --config preference --config methods/pacmr --model.policy.quantization 4bit --model.policy.rank 4
        --model.weighting.every 2 --model.weighting.estimator GhostDotProduct --model.learning_rate 1e-2
        --data.source EmbeddedWorld --data.source.pairs 24 --data.source.validation_pairs 8
        --data.global_batch_size 8 --data.meta_batch_size 8 --trainer.accelerator cpu --trainer.logger false
        --trainer.max_steps 4 --trainer.max_epochs -1 --trainer.val_check_interval 1.0
        --checkpoint.every_n_train_steps 2 --checkpoint.save_top_k -1 --trainer.enable_progress_bar false
    """
    callbacks = ["--trainer.callbacks", "[{class_path: RunSummary}, {class_path: WeightRecorder}]"]

    def run(name, *more):
        where = ["--trainer.default_root_dir", str(folder / name), "--model.policy.model", model]
        cli.main([*words.split(), *callbacks, *where, *more])
        return folder / name

    return run


@pytest.fixture(scope="module")
def trained(fit):
    return fit("whole")


def state(run, name="last"):
    return torch.load(run / "checkpoints" / f"{name}.ckpt", weights_only=True)


def test_a_run_trains_and_goes_on_bit_for_bit(fit, trained):
    whole = state(trained)
    assert all("lora_" in name and v.dtype == torch.float32 for name, v in whole["state_dict"].items())
    assert all(v.any() for v in whole["state_dict"].values())
    killed = shutil.copytree(trained, trained.parent / "killed")
    for name in ("last", "step-4"):
        (killed / "checkpoints" / f"{name}.ckpt").unlink()
    again = state(fit("killed", "--ckpt_path", "last"))
    assert again["global_step"] == whole["global_step"] == 4
    for name, value in whole["state_dict"].items():
        assert torch.equal(value, again["state_dict"][name]), name
        assert not torch.equal(value, state(trained, "step-2")["state_dict"][name]), name
    config = yaml.safe_load((trained / "config.yaml").read_text())
    policy = config["model"]["init_args"]["policy"]["init_args"]
    assert policy["quantization"] == "4bit" and policy["dtype"] == "float32"


def test_what_follows_a_run(trained, model, tmp_path, capsys):
    cli.main(["export", str(trained), str(tmp_path / "adapter")])
    cli.main(["export", str(trained), str(tmp_path / "merged"), "--merged"])
    said = capsys.readouterr().err
    line = r"a base in 4bit into the stored base, in float32: (\d+\.\d)% of the policy's implicit margins"
    assert 70 < float(re.search(line, said)[1]) < 130 and "--dtype float32 rounds" not in said
    for name in ("adapter", "merged"):
        assert "NF4" in (tmp_path / name / "README.md").read_text()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not getattr(merged, "is_quantized", False)
    on_plain = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").merge_and_unload()
    torch.testing.assert_close(merged.state_dict(), on_plain.state_dict(), atol=1e-6, rtol=0)
    base = AutoModelForCausalLM.from_pretrained(model)
    moved = [n for n, v in base.state_dict().items() if not torch.equal(v, merged.state_dict()[n])]
    assert moved and all("proj" in name for name in moved)
    config = ["--config", str(trained / "config.yaml"), "--ckpt_path", "last"]
    cli.main(["predict", *config, "--model.max_new_tokens", "4"])
    lines = (trained / "generations.jsonl").read_text().splitlines()
    assert lines and all("response" in json.loads(line) for line in lines)
    cli.main(["audit", str(trained), "--output", str(tmp_path / "audit")])
    assert list((tmp_path / "audit").iterdir())


def test_the_cache_knows(bnb, model, make_batch, monkeypatch):
    plain, packed = PolicyModel(model, rank=4), PolicyModel(model, rank=4, quantization="4bit")
    for policy in (plain, packed):
        policy.build()
        policy.check(make_batch())
    options = packed.log_prob_options()
    assert options["quantization"].startswith("4bit, bitsandbytes 0.") and json.dumps(options)
    assert "quantization" not in plain.log_prob_options()
    for name in ("to", "cpu"):
        monkeypatch.setattr(bnb.nn.Params4bit, name, lambda *_: pytest.fail("the scales would go along"))
    assert packed.reference_digest() != plain.reference_digest()
