"""The command `openrlhf-logra`: subcommands, exit codes, and what they import."""

import argparse
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from openrlhf_logra import __version__
from openrlhf_logra.cli import doctor, main, train
from openrlhf_logra.host import versions
from openrlhf_logra.host.versions import MISSING, OK, Finding


@pytest.mark.parametrize("name", main.COMMANDS)
def test_every_subcommand_keeps_the_convention(name):
    module = main.load(name)
    module.add_arguments(argparse.ArgumentParser())
    assert callable(module.run)
    assert main.help_text(name) == module.__doc__.splitlines()[0] != ""


def test_help_lists_every_subcommand(capsys):
    with pytest.raises(SystemExit) as stop:
        main.main(["--help"])
    printed = capsys.readouterr().out
    assert stop.value.code == 0
    assert all(name in printed for name in main.COMMANDS)


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"openrlhf-logra {__version__}\n"


@pytest.mark.parametrize("argv", [[], ["no-such-command"], ["--no-such-flag"]])
def test_bad_input_is_exit_code_2(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        main.main(argv)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("openrlhf-logra: ") and line.endswith("see openrlhf-logra --help")


@pytest.mark.parametrize(
    "argv, problem",
    [
        (["doctor", "--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["describe", "--model", "m", "--logra.foo", "8"], "unrecognized arguments: --logra.foo 8"),
        (["describe", "--model", "m", "--logra.rank", "many"], "argument --logra.rank: invalid int value: 'many'"),
        (["replay", "--base", "m"], "the following arguments are required: --records, --step, --out"),
    ],
)
def test_bad_arguments_of_a_subcommand_are_one_line(argv, problem, capsys):
    with pytest.raises(SystemExit) as stop:
        main.main(argv)
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"openrlhf-logra {argv[0]}: {problem}; see openrlhf-logra {argv[0]} --help\n"


@pytest.mark.parametrize("name", main.NEEDED_BY)
def test_what_is_not_installed_is_one_line(name, monkeypatch, capsys):
    monkeypatch.setattr(versions, "_installed", lambda peer: None if peer.package == "safetensors" else "99")
    assert main.main([name]) == 2
    assert capsys.readouterr().err == (
        f"openrlhf-logra {name}: safetensors is not installed: pip install safetensors (without a GPU: "
        f"{versions.CPU_RECIPE})\n"
    )


@pytest.mark.parametrize(
    "argv", [["train", "--logra.enable"], ["describe"], ["doctor"], ["report", "run"], ["replay"], ["verify"]]
)
def test_without_any_package_there_is_no_traceback(argv):
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); from openrlhf_logra.cli import main; sys.exit(main.main())"
    )
    command = [sys.executable, "-S", "-c", code, str(Path(main.__file__).parents[2]), *argv]
    done = subprocess.run(command, capture_output=True, text=True)
    if argv == ["doctor"]:  # whose table says it
        assert done.returncode == 1 and done.stderr == ""
    else:
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
        assert "pip install" in done.stderr


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model's directory without weights, beside a module with callbacks, in the working directory."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaConfig(vocab_size=64, **sizes).save_pretrained(tmp_path / "model")
    source = "from openrlhf_logra.train.callbacks import Callback\nclass Mine(Callback): ...\nclass Other: ...\n"
    (tmp_path / "somebodys_callbacks.py").write_text(source)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    yield "model"
    sys.modules.pop("somebodys_callbacks", None)


@pytest.mark.parametrize(
    "flags, problem",
    [
        (["--logra.callbacks", "somebodys_callbacks:Mine"], None),
        (["--logra.callbacks", "somebodys_callbacks:Other"], "somebodys_callbacks:Other: must derive from"),
        (["--logra.callbacks", "nowhere:Nothing"], "nowhere:Nothing: cannot be made: No module named 'nowhere'"),
        (["--logra.target_modules", "lm_head"], "predicted-KL control measures the policy at the output head's input"),
        (["--logra.target_modules", "lm_head", "--logra.kl.disable"], None),
    ],
)
def test_describe_refuses_what_training_refuses(model, flags, problem, capsys):
    assert main.main(["describe", "--model", model, "--logra.rank", "8", *flags]) == (2 if problem else 0)
    printed = capsys.readouterr()
    if problem:
        assert printed.out == "" and len(printed.err.splitlines()) == 1
        assert printed.err.startswith(f"openrlhf-logra describe: {flags[0]}") and problem in printed.err
    else:
        assert "trainer state" in printed.out and printed.err == ""


def test_help_imports_no_subcommand():
    code = (
        "import sys\nfrom openrlhf_logra.cli import main\n"
        "try:\n    main.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([name for name in main.COMMANDS if f'openrlhf_logra.cli.{name}' in sys.modules])\n"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-2:] == ["[]", "False"]


@pytest.fixture
def startup(monkeypatch):
    """Stands for host/startup.py, and records."""
    calls = []
    monkeypatch.setattr(train.startup, "activate", lambda: calls.append("activate"))
    monkeypatch.setattr(runpy, "run_module", lambda name, **options: calls.append((name, options, list(sys.argv[1:]))))
    monkeypatch.setattr(sys, "argv", ["openrlhf-logra"])
    return calls


@pytest.mark.parametrize("flags", [["--actor.model_name_or_path", "m", "--logra.enable"], ["--help"]])
def test_train_activates_and_then_runs_the_stock_module(startup, monkeypatch, flags):
    monkeypatch.setattr(versions, "findings", lambda: [Finding("openrlhf", "0.11.2", "0.11.2", OK, "")])
    assert main.main(["train", *flags]) == 0
    assert startup == ["activate", (train.STOCK_MODULE, {"run_name": "__main__", "alter_sys": True}, flags)]


def test_train_without_the_flag_is_exit_code_2(startup, monkeypatch, capsys):
    monkeypatch.setattr(versions, "findings", lambda: [Finding("openrlhf", "0.11.2", "0.11.2", OK, "")])
    assert main.main(["train", "--actor.model_name_or_path", "m"]) == 2
    assert capsys.readouterr().err == "openrlhf-logra train: --logra.enable is not among the flags; add it\n"
    assert startup == []


def test_train_finds_modules_where_it_is_called(startup, monkeypatch, tmp_path):
    """As `python -m` does: callbacks may lie there."""
    monkeypatch.setattr(versions, "findings", lambda: [Finding("openrlhf", "0.11.2", "0.11.2", OK, "")])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    assert main.main(["train", "--logra.enable"]) == 0
    assert sys.path[0] == str(tmp_path)


def test_train_without_openrlhf_is_exit_code_2(startup, monkeypatch, capsys):
    monkeypatch.setattr(versions, "findings", lambda: [Finding("openrlhf", None, "0.11.2", MISSING, "pip install it")])
    assert main.main(["train", "--logra.enable"]) == 2
    assert capsys.readouterr().err == "openrlhf-logra train: openrlhf is not installed: pip install it\n"
    assert startup == []


@pytest.fixture
def healthy(monkeypatch):
    """A machine on which nothing is wrong."""
    fine = Finding("something", "1.0", "1.x", OK, "")
    monkeypatch.setattr(versions, "findings", lambda: [fine])
    monkeypatch.setattr(doctor, "startup_line", lambda: fine)
    monkeypatch.setattr(doctor, "vllm_entry_point", lambda: fine)
    return fine


def test_doctor_on_a_healthy_machine(healthy, capsys):
    assert main.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "python" in printed and "GPU" in printed and "something  1.0" in printed and "fix" not in printed


def test_doctor_prints_the_fix_and_exits_with_1(healthy, monkeypatch, capsys):
    ray = Finding("ray", None, "2.55.x", MISSING, "pip install it")
    monkeypatch.setattr(versions, "findings", lambda: [healthy, ray])
    assert main.main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "fix ray: pip install it"


def test_the_oldest_python_is_the_same_everywhere():
    root = Path(__file__).parents[2]
    wanted = doctor.python().wanted
    assert f'python_requires="{wanted}"' in (root / "setup.py").read_text()
    assert f"{wanted.removeprefix('>=')} or later" in (root / "README.md").read_text()


@pytest.mark.parametrize(
    ("registered", "allowed", "found"),
    [
        (True, None, "registered"),
        (True, "other,openrlhf_logra", "registered"),
        (True, "other", "filtered out"),
        (True, "", "filtered out"),
        (False, None, None),
    ],
)
def test_doctor_sees_the_vllm_entry_point_as_vllm_does(monkeypatch, registered, allowed, found):
    monkeypatch.setattr(doctor, "registered", lambda: registered)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if allowed is not None:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    row = doctor.vllm_entry_point()
    assert row.found == found
    assert (row.status == OK) == (row.fix == "") == (found == "registered")


@pytest.mark.parametrize(
    ("stdout", "stderr", "found"),
    [
        ("True\n", "", "active"),
        ("False\n", "", None),
        ("False\n", "openrlhf_logra: start-up failed, LoGRA is off: ImportError no", "fails"),
    ],
)
def test_doctor_sees_whether_the_start_up_line_works(monkeypatch, tmp_path, stdout, stderr, found):
    answer = SimpleNamespace(stdout=stdout, stderr=stderr)
    monkeypatch.setattr(doctor.subprocess, "run", lambda *command, **options: answer)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert doctor.startup_line().found == found
    if found is None:
        (tmp_path / doctor.PTH).touch()
        assert doctor.startup_line().found == "not active"
