"""Bad input: one clear line and exit code 2 before Ray starts; what is refused and what is not."""

import re
import subprocess
import sys

import pytest
from training import LOGRA_FLAGS, check_flags, stock_flags

from openrlhf_logra.config import ConfigError


def test_the_tiny_run_is_accepted(parser, tiny_model, tmp_path):
    check_flags(parser, [*stock_flags(tiny_model, tmp_path), *LOGRA_FLAGS])


# flags after the accepted ones -> what the line must say
REFUSED = {
    "unknown target": (["--logra.target_modules", "q_projj"], r"q_projj matches no module.*q_proj, k_proj"),
    "target not linear": (["--logra.target_modules", "embed_tokens"], r"embed_tokens.*Embedding.*not nn\.Linear"),
    "tied head": (["--logra.target_modules", "lm_head"], r"lm_head.*shares its weight with model\.embed_tokens"),
    "rank 0": (["--logra.rank", "0"], r"--logra\.rank is 0"),
    "rank -1": (["--logra.rank", "-1"], r"--logra\.rank is -1"),
    "rank too large": (["--logra.rank", "65"], r"above in_features 64.*largest rank that fits every target is 64"),
    "no model": (["--actor.model_name_or_path", "/nowhere/at/all"], r"/nowhere/at/all: no such directory"),
    "model without config": (["--actor.model_name_or_path", "."], r"no config\.json"),
    "lora": (["--ds.lora.rank", "8"], r"--ds\.lora\.rank 8.*--logra\.method lora"),
    "lora without a rank": (["--logra.method", "lora"], r"--logra\.method lora.*--ds\.lora\.rank, which is 0"),
    "lora on a module too many": (
        ["--logra.method", "lora", "--ds.lora.rank", "4", "--ds.lora.target_modules", "q_proj", "nope"],
        r"--ds\.lora\.target_modules q_proj nope: no module of the model is called 'nope'",
    ),
    "lora that adds nothing": (
        ["--logra.method", "lora", "--ds.lora.rank", "4", "--ds.lora.alpha", "0"],
        r"--ds\.lora\.alpha 0: .* must be positive",
    ),
    "lora that drops everything": (
        ["--logra.method", "lora", "--ds.lora.rank", "4", "--ds.lora.dropout", "1.5"],
        r"--ds\.lora\.dropout 1\.5: must be",
    ),
    "flora drawn too often": (
        ["--logra.method", "flora", "--logra.rank", "2", "--logra.refresh_every", "1"],
        r"--logra\.refresh_every 1: the momentum of .* take at least",
    ),
    "a limit of nothing": (
        ["--logra.method", "galore", "--logra.norm_growth_limit", "1.01"],
        r"--logra\.norm_growth_limit 1\.01: --logra\.method galore limits nothing",
    ),
    "lora on no module": (
        ["--logra.method", "lora", "--ds.lora.rank", "4", "--ds.lora.target_modules", "q_projj"],
        r"--ds\.lora\.target_modules q_projj",
    ),
    "rank above a side": (
        ["--logra.method", "galore", "--logra.rank", "65"],
        r"above the smaller side \d+ of .*the largest rank that fits every target is \d+",
    ),
    "factors of no product": (["--logra.method", "fira", "--logra.sync.mode", "factor"], r"fira makes no factors"),
    "limit below 1": (["--logra.norm_growth_limit", "0.5"], r"--logra\.norm_growth_limit is 0\.5"),
    "limit that is no number": (["--logra.norm_growth_limit", "nan"], r"--logra\.norm_growth_limit is nan"),
    "4 bit": (["--ds.load_in_4bit"], r"--ds\.load_in_4bit"),
    "muon": (["--actor.optim", "muon"], r"--actor\.optim muon.*adam"),
    "fp16": (["--ds.param_dtype", "fp16"], r"--ds\.param_dtype fp16.*bf16"),
    "liger": (["--ds.use_liger_kernel"], r"--ds\.use_liger_kernel"),
    "deepcompile": (["--ds.deepcompile"], r"--ds\.deepcompile"),
    "autotp": (["--ds.tensor_parallel_size", "2"], r"--ds\.tensor_parallel_size 2.*use 1"),
    "hpz": (["--ds.zpg", "2"], r"--ds\.zpg 2"),
    "ema": (["--train.enable_ema"], r"--train\.enable_ema"),
    "no engines": (["--vllm.num_engines", "0"], r"--vllm\.num_engines"),
    "learning rate that is no number": (["--actor.adam.lr", "nan"], r"--actor\.adam\.lr nan"),
    "norm that is no number": (["--actor.max_norm", "nan"], r"--actor\.max_norm nan"),
    "eps outside of float32": (["--logra.eps", "1e-20"], r"--logra\.eps is 1e-20"),
    "no learning rate": (["--actor.adam.lr", "0"], r"--actor\.adam\.lr 0"),
    "evaluation first, asynchronously": (
        ["--logra.eval_at_start", "--train.async_enable"],
        r"--logra\.eval_at_start: asynchronous",
    ),
    "no data folder": (["--data.prompt_dataset", "/no/such/folder"], r"/no/such/folder: no such file or directory"),
    "no data": (["--data.prompt_dataset", "nothing.jsonl"], r"--data\.prompt_dataset nothing\.jsonl: no such file"),
    "no evaluation data": (["--eval.dataset", "nothing.jsonl"], r"--eval\.dataset nothing\.jsonl: no such file"),
    "no such column": (["--data.input_key", "question"], r"no column 'question'.*prompt, label"),
    "no reward": (["--reward.remote_url", ""], r"--reward\.remote_url is missing"),
    "no reward file": (["--reward.remote_url", "nothing.py"], r"--reward\.remote_url nothing\.py: no such file"),
    "gaussian factors": (
        ["--logra.distribution", "gaussian", "--logra.sync.mode", "factor"],
        r"factor needs --logra\.distribution rademacher",
    ),
    "update ratio 0": (["--logra.update_ratio", "0"], r"--logra\.update_ratio is 0"),
    "update ratio nan": (["--logra.update_ratio", "nan"], r"--logra\.update_ratio is nan"),
    "beta 1": (["--logra.beta2", "1"], r"--logra\.beta2 is 1"),
    "eps 0": (["--logra.eps", "0"], r"--logra\.eps is 0"),
    "refresh -1": (["--logra.refresh_every", "-1"], r"--logra\.refresh_every is -1"),
    **{
        f"{flag} {value}": ([f"--logra.{flag}", value], rf"--logra\.{flag} is {value}")
        for flag in ("kl.budget", "kl.final_budget", "kl.alpha_max")
        for value in ("0.0", "-1.0", "nan", "inf")
    },
    "a budget that would rise": (
        ["--logra.kl.budget", "1e-5"],  # below the final one's default
        r"--logra\.kl\.final_budget 2e-05 is above --logra\.kl\.budget 1e-05.*lower it",
    ),
    "horizon 0": (["--logra.kl.horizon", "0"], r"--logra\.kl\.horizon is 0"),
    "no responses to probe": (["--logra.kl.probe_responses", "0"], r"--logra\.kl\.probe_responses is 0"),
    "no tokens to probe": (["--logra.kl.probe_max_tokens", "0"], r"--logra\.kl\.probe_max_tokens is 0"),
    "mismatch weight 0": (["--logra.kl.mismatch_ema", "0"], r"--logra\.kl\.mismatch_ema is 0"),
    "mismatch floor nan": (["--logra.kl.mismatch_floor", "nan"], r"--logra\.kl\.mismatch_floor is nan"),
    "temperature 0": (["--rollout.temperature", "0"], r"--rollout\.temperature 0.*--logra\.kl\.disable"),
    "running baseline beside another": (
        ["--logra.reward_baseline", "running"],
        r"estimator group_norm.*use reinforce",
    ),
    "no such callback": (
        ["--logra.callbacks", "nowhere:Nothing"],
        r"--logra\.callbacks nowhere:Nothing: cannot be made",
    ),
    "verify 0": (["--logra.sync.verify_every", "0"], r"--logra\.sync\.verify_every is 0"),
}


@pytest.mark.parametrize("flags, message", REFUSED.values(), ids=list(REFUSED))
def test_refused_with_one_line(parser, flags, message, tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        check_flags(parser, [*stock_flags(tiny_model, tmp_path), *LOGRA_FLAGS, *flags])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("bad.jsonl", "{not json\n", r"cannot be read as jsonl: JSON parse error.*"),
        ("bad.jsonl", '{"prompt": "a", "label"', r"cannot be read as jsonl: JSON parse error.*"),
        *((f"bad.{suffix}", "", "the file is empty") for suffix in ("jsonl", "json", "csv", "parquet", "arrow")),
        ("bad.jsonl", "\n\n", "has no rows"),
        ("bad.json", "[]", "has no rows"),
        ("bad.csv", "prompt,label\n", "has no rows"),
    ],
)
def test_a_dataset_that_cannot_be_read(parser, name, content, words, tiny_model, tmp_path):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ConfigError, match=rf"--data\.prompt_dataset .*{re.escape(name)}: {words}$") as caught:
        check_flags(parser, [*stock_flags(tiny_model, tmp_path), *LOGRA_FLAGS, "--data.prompt_dataset", str(path)])
    assert "\n" not in str(caught.value)


def test_a_filtered_vllm_plugin(parser, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "something_else")
    with pytest.raises(ConfigError, match="VLLM_PLUGINS=something_else"):
        check_flags(parser, [*stock_flags(tiny_model, tmp_path), *LOGRA_FLAGS])
    monkeypatch.setenv("VLLM_PLUGINS", "something_else,openrlhf_logra")
    check_flags(parser, [*stock_flags(tiny_model, tmp_path), *LOGRA_FLAGS])


@pytest.mark.parametrize(
    "choice", [["--logra.method", "sgd"], ["--logra.optimizer", "lion"], ["--logra.rank", "many"]]
)
def test_values_that_do_not_parse(parser, choice, capsys):
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(choice)
    assert caught.value.code == 2


def test_no_flag_of_ours_makes_a_stock_abbreviation_ambiguous(parser):
    ours = [option for option in parser._option_string_actions if option.startswith("--logra.")]
    stock = [option for option in parser._option_string_actions if not option.startswith("--logra.")]
    assert len(ours) > 15
    prefixes = {option[:i] for option in stock if option.startswith("--") for i in range(3, len(option) + 1)}
    # Only a prefix of one single stock option is an abbreviation that works today.
    alone = {p for p in prefixes if sum(option.startswith(p) for option in stock) == 1}
    assert [p for p in alone if any(option.startswith(p) for option in ours)] == []


def stock_command(flags, tmp_path, **environment):
    import os

    return subprocess.run(
        [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *flags],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )


def refusal_lines(done) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("openrlhf_logra: error: ")]


def test_exit_code_and_nothing_started(tiny_model, tmp_path):
    done = stock_command([*stock_flags(tiny_model, tmp_path), *LOGRA_FLAGS, "--logra.rank", "1000"], tmp_path)
    assert done.returncode == 2 and len(refusal_lines(done)) == 1, done.stderr[-2000:]
    assert "Started a local Ray instance" not in done.stderr + done.stdout and "Traceback" not in done.stderr
    assert not (tmp_path / "model").exists() and not (tmp_path / "checkpoints").exists()


def test_flags_without_enable(tiny_model, tmp_path):
    done = stock_command([*stock_flags(tiny_model, tmp_path), "--logra.rank", "8"], tmp_path)
    assert done.returncode == 2 and "without --logra.enable" in refusal_lines(done)[0]


def test_a_wrong_host_version_stops_before_the_host_is_imported(tiny_model, tmp_path):
    info = tmp_path / "fake" / "openrlhf-0.9.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: openrlhf\nVersion: 0.9.0\n")
    done = stock_command([*LOGRA_FLAGS], tmp_path, PYTHONPATH=str(tmp_path / "fake"))
    assert done.returncode == 2 and "openrlhf 0.9.0" in refusal_lines(done)[0], done.stderr[-2000:]


def test_a_missing_host_package(tmp_path):
    """Without site-packages there is no openrlhf; the start-up line is called by hand as site would."""
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop()); from openrlhf_logra.host import startup; startup.activate()\n"
        "import openrlhf"
    )
    from pathlib import Path

    import openrlhf_logra

    root = str(Path(openrlhf_logra.__file__).parents[1])
    done = subprocess.run([sys.executable, "-S", "-c", code, root], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "openrlhf is not installed" in refusal_lines(done)[0], done.stderr


def test_help_shows_the_group(tmp_path):
    done = stock_command(["--logra.enable", "--help"], tmp_path)
    assert done.returncode == 0 and "LoGRA" in done.stdout and "--logra.refresh_every" in done.stdout
