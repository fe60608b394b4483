"""What the controllers and actors of OpenRLHF do for predicted-KL control and the running baseline, without Ray."""

import asyncio
import math
import weakref
from types import SimpleNamespace

import pytest
import torch

from openrlhf_logra.host import cpu

cpu.install()

from openrlhf.trainer.ppo_utils.experience import Experience  # noqa: E402
from openrlhf.trainer.ppo_utils.kl_controller import AdaptiveKLController  # noqa: E402

from openrlhf_logra.config import ConfigError, LograConfig  # noqa: E402
from openrlhf_logra.host import controller, log_probs, rollout_actor, trainer_actor  # noqa: E402
from openrlhf_logra.math.baseline import RunningBaseline  # noqa: E402
from openrlhf_logra.train.callbacks import Callback, UpdateContext, load_callbacks  # noqa: E402
from openrlhf_logra.train.kl_control import PROBE_KL, KLControl  # noqa: E402
from openrlhf_logra.train.probe import ProbeBatch, first_responses  # noqa: E402
from openrlhf_logra.train.step import Proposal, StepOutcome  # noqa: E402

# ---- the responses that are probed ----------------------------------------------------------------------------------


def test_positions_are_those_whose_logits_make_the_action_log_probs():
    """Padding on either side, actions that are not one run (several turns), and responses without any."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 90, (4, 12), generator=generator)
    attention = torch.ones_like(tokens)
    attention[0, 9:] = 0  # right padding
    attention[1, :3] = 0  # left padding
    actions = torch.zeros(4, 8, dtype=torch.int64)
    actions[0, 2:5] = 1
    actions[1, [1, 2, 6]] = 1
    actions[3, :] = 1
    logits = torch.randn(4, 12, 90, generator=generator)
    log_probs_of = torch.log_softmax(logits, -1).gather(-1, torch.roll(tokens, -1, 1)[..., None])[..., 0]
    expected = log_probs_of[:, :-1][:, -8:]  # as openrlhf.models.Actor takes them
    found = first_responses(tokens, attention, actions, 10, 100)
    assert len(found) == 3
    for row, (sequence, positions) in zip((0, 1, 3), found):
        kept = logits[row][attention[row].bool()]
        following = tokens[row][attention[row].bool()].roll(-1)
        ours = torch.log_softmax(kept[positions], -1).gather(-1, following[positions][:, None])[:, 0]
        assert torch.equal(ours, expected[row][actions[row].bool()])
        assert len(sequence) == positions[-1] + 1
        assert torch.equal(sequence, tokens[row][attention[row].bool()][: len(sequence)])
    assert len(first_responses(tokens, attention, actions, 2, 100)) == 2
    assert first_responses(tokens, attention, actions, 0, 100) == []
    assert [len(positions) for _, positions in first_responses(tokens, attention, actions, 3, 2)] == [2, 2, 2]


@pytest.mark.parametrize(
    "lengths, groups",
    [
        ([], []),
        ([5000], [[0]]),
        ([10, 20, 30], [[0, 1, 2]]),
        ([2048, 2048, 1], [[0, 1], [2]]),
        ([1, 5000, 1], [[0], [1], [2]]),
        ([100] * 41, [[*range(40)], [40]]),
    ],
)
def test_short_responses_share_a_pass(lengths, groups):
    sequences = tuple(torch.zeros(length, dtype=torch.int64) for length in lengths)
    assert ProbeBatch(sequences, tuple(sequence[:1] for sequence in sequences), 1.0).passes() == groups


# ---- callbacks ------------------------------------------------------------------------------------------------------


class Good(Callback):
    pass


class Broken(Callback):
    def __init__(self):
        raise OSError("no such disk")


def test_callbacks_are_made_in_order():
    made = load_callbacks((f"{__name__}:Good", "openrlhf_logra.train.callbacks:Callback"))
    assert [type(one) for one in made] == [Good, Callback]


@pytest.mark.parametrize(
    "path, says",
    [
        ("Good", "must be package.module:Class"),
        (f"{__name__}:", "must be package.module:Class"),
        ("no_such_module:Good", "No module named 'no_such_module'"),
        (f"{__name__}:Missing", "Missing"),
        (f"{__name__}:Broken", "no such disk"),
        ("types:SimpleNamespace", "must derive from openrlhf_logra.train.callbacks.Callback"),
    ],
)
def test_callbacks_that_cannot_be_are_refused(path, says):
    with pytest.raises(ConfigError, match=says) as caught:
        load_callbacks((path,))
    assert path in str(caught.value) and "\n" not in str(caught.value)


# ---- the controller, with a probe that says what it is told ---------------------------------------------------------


class Told:
    """Stands for `Probe`; q and the realised KL are given, of differences one after the other (the last stays) or with
    what a step of epsilon costs."""

    def __init__(self, tangent, differences=(), realised=1e-4, wrong=0.004):
        self.tangent, self.differences, self.realised, self.epsilons = tangent, list(differences), realised, []
        self.wrong = wrong

    def __call__(self, *_):
        return self

    def learn_head(self, batch):
        return self.wrong

    def hidden(self, batch):
        return [torch.zeros(len(positions), 1) for positions in batch.positions]

    def variance_by_tangent(self, batch, along):
        if isinstance(self.tangent, Exception):
            raise self.tangent
        return self.tangent * 2 * batch.count

    def variance_by_difference(self, batch, base, along, epsilon):
        self.epsilons.append(epsilon)
        said = self.differences.pop(0) if len(self.differences) > 1 else self.differences[0]
        q, cost = said if isinstance(said, tuple) else (said, epsilon**2 * said)
        return q * 2 * batch.count, cost * batch.count

    def head(self):
        return None

    def divergence(self, batch, before, after, head_before):
        return self.realised * batch.count


def headed():
    model = torch.nn.Linear(1, 1)
    model.get_output_embeddings = lambda: model
    return model


def one_update(control, monkeypatch, told, model=None):
    import openrlhf_logra.train.kl_control as module

    monkeypatch.setattr(module, "Probe", told)
    control._probe = control._probe and told
    batch = ProbeBatch((torch.arange(5),), (torch.tensor([2, 3]),), 1.0)
    context = UpdateContext(
        version=0,
        proposal=Proposal(True),
        alpha=0.5,
        batch=batch,
        model=model or headed(),
        device=torch.device("cpu"),
        forward=None,
        along=None,
    )
    control.on_update(context)
    alpha = 0.0 if context.held else context.alpha
    context.outcome = StepOutcome((), bool(context.held), 1, alpha=alpha)
    control.on_step_end(context)
    return context


def control(**settings):
    said = []
    config = LograConfig(**settings)
    made = KLControl(config.kl_settings(), config.kl_probe, said.append)
    made.said = said
    return made


def test_the_step_has_the_budget(monkeypatch):
    made = control(kl_budget=1e-3)
    context = one_update(made, monkeypatch, Told(1e-3 / 4, [1e-3 / 4] * 4, realised=2e-3))
    assert context.alpha == pytest.approx(2.0)
    assert context.metrics["logra/predicted_kl"] == pytest.approx(1e-3)
    assert context.metrics["logra/realized_kl"] == pytest.approx(2e-3)
    assert context.metrics["logra/kl_budget"] == 1e-3 and "logra/mismatch" not in context.metrics
    assert made.said == ["[logra] predicted KL by forward-mode AD, which this model has"]
    one_update(made, monkeypatch, Told(1e-3))
    assert len(made.said) == 1


@pytest.mark.parametrize("error", [NotImplementedError("no formula for jvp\nof this"), RuntimeError("no jvp")])
def test_auto_says_why_it_takes_differences(monkeypatch, error):
    made = control()
    told = Told(error, [1e-3, 1e-3])
    context = one_update(made, monkeypatch, told)
    assert not context.held and len(made.said) == 1 and "central differences" in made.said[0]
    assert str(error).splitlines()[0] in made.said[0] and "\n" not in made.said[0]
    one_update(made, monkeypatch, Told(AssertionError("is not tried again"), [1e-3]))


def test_a_model_in_partitions_stops_with_the_way_out(monkeypatch):
    model = headed()
    model.weight.ds_tensor = None
    with pytest.raises(RuntimeError, match="--logra.kl.probe fd"):
        one_update(control(), monkeypatch, Told(NotImplementedError("no jvp")), model)


def test_jvp_that_was_asked_for_is_not_replaced(monkeypatch):
    with pytest.raises(RuntimeError, match="no jvp.*--logra.kl.probe fd"):
        one_update(control(kl_probe="jvp"), monkeypatch, Told(NotImplementedError("no jvp")))


def test_auto_gives_up_a_jvp_that_no_longer_fits(monkeypatch):
    made = control()
    one_update(made, monkeypatch, Told(1e-3, [1e-3, 1e-3]))
    context = one_update(made, monkeypatch, Told(torch.OutOfMemoryError("full"), [1e-3]))
    assert not context.held and "failed (full)" in made.said[-1]


def test_auto_compares_once_and_mistrusts_lost_tangents(monkeypatch):
    made = control()
    context = one_update(made, monkeypatch, Told(1e-3 / 2, [1e-3, 1e-3], realised=1e-3))
    assert context.metrics["logra/predicted_kl"] == pytest.approx(context.alpha**2 * 1e-3)
    assert "q = 5.00e-04" in made.said[0] and "1.00e-03" in made.said[0]
    one_update(made, monkeypatch, Told(AssertionError("is not tried again"), [1e-3]))
    again = control()
    again.load_state_dict(made.state_dict())
    one_update(again, monkeypatch, Told(AssertionError("nor after a resume"), [1e-3]))


def test_auto_takes_differences_where_tangents_are_no_numbers(monkeypatch):
    made = control()
    unsettled = [(1e-3, PROBE_KL), (5e-4, PROBE_KL / 4)]
    assert not one_update(control(), monkeypatch, Told(math.nan, unsettled)).held
    context = one_update(made, monkeypatch, Told(math.nan, [1e-3] * 4))
    assert context.metrics["logra/predicted_kl"] == pytest.approx(context.alpha**2 * 1e-3) and not context.held
    assert "central differences" in made.said[0]


def test_auto_compares_again_where_differences_were_no_numbers(monkeypatch):
    made = control()
    one_update(made, monkeypatch, Told(1e-3, [math.nan] * 4))
    assert not made.said
    one_update(made, monkeypatch, Told(1e-3 / 2, [1e-3, 1e-3]))
    assert "q = 5.00e-04" in made.said[0]


def test_what_a_failed_pass_had_allocated_is_free_before_differences_are_taken(monkeypatch):
    class Failing(Told):
        def variance_by_tangent(self, batch, along):
            activations = torch.zeros(8)
            self.left = weakref.ref(activations)
            raise torch.OutOfMemoryError("full")

        def variance_by_difference(self, *arguments):
            assert self.left() is None
            return super().variance_by_difference(*arguments)

    assert not one_update(control(), monkeypatch, Failing(None, [1e-3, 1e-3])).held


def test_a_step_too_long_is_made_shorter(monkeypatch):
    told = Told(None, [math.inf, math.nan, 1e-3, 1e-3])
    context = one_update(control(kl_probe="fd"), monkeypatch, told)
    assert told.epsilons[:3] == [1.0, 1e-2, pytest.approx(1e-4)] and not context.held


class Saturating(Told):
    """A policy like a real one: q at small steps; at long ones its KL grows no further, and differences vanish."""

    def __init__(self, q, most, tangent=None):
        super().__init__(tangent)
        self.q, self.most = q, most

    def variance_by_difference(self, batch, base, along, epsilon):
        self.epsilons.append(epsilon)
        cost = self.most * (1 - math.exp(-(epsilon**2) * self.q / self.most))
        return 2 * batch.count * cost / epsilon**2, cost * batch.count


@pytest.mark.parametrize("q", [1e-4, 1.0, 1e6, 1e12])
@pytest.mark.parametrize("most", [0.1, 10.0])
def test_differences_are_taken_where_the_policy_is_not_saturated(monkeypatch, q, most):
    """From 1 on, which is far too long for most of these, and from a step that has become too long."""
    made = control(kl_probe="fd", kl_alpha_max=1e9)
    for scale in (1, 1e4, 1e-3):
        one_update(made, monkeypatch, Saturating(q * scale, most))  # may search for too long, and is held then
        one_update(made, monkeypatch, Saturating(q * scale, most))
        context = one_update(made, monkeypatch, Saturating(q * scale, most))
        predicted = context.alpha**2 * q * scale
        assert predicted == pytest.approx(context.metrics["logra/kl_budget"], rel=0.1)


def test_differences_that_do_not_settle_do_not_overrule_tangents(monkeypatch):
    made = control()
    told = Told(1e-3, [(5e-4, PROBE_KL), (2.5e-4, PROBE_KL / 4)])
    context = one_update(made, monkeypatch, told)
    assert context.metrics["logra/predicted_kl"] == pytest.approx(context.alpha**2 * 1e-3)
    assert "forward-mode AD, which" in made.said[0] and told.epsilons == [1.0, 0.5]


def test_differences_that_find_no_step_hold_it(monkeypatch):
    made = control(kl_probe="fd")
    context = one_update(made, monkeypatch, Told(None, [(1e-3, 1.0)]))
    assert "not finite" in context.held
    assert not one_update(made, monkeypatch, Told(None, [1e-3])).held


def test_what_was_asked_for_is_not_what_a_resume_finds(monkeypatch):
    made = control(kl_probe="fd")
    one_update(made, monkeypatch, Told(None, [1e-3]))
    again = control()
    again.load_state_dict(made.state_dict())
    one_update(again, monkeypatch, Told(1e-3, [1e-3]))
    assert "forward-mode AD, which" in again.said[0]


def test_a_head_that_is_not_understood_stops(monkeypatch):
    for wrong in (0.1, math.inf, math.nan):
        with pytest.raises(RuntimeError, match="--logra.kl.disable"):
            one_update(control(), monkeypatch, Told(1e-3, wrong=wrong))
    model = headed()
    model.get_output_embeddings = lambda: None
    with pytest.raises(RuntimeError, match="no output head.*--logra.kl.disable"):
        one_update(control(), monkeypatch, Told(1e-3), model)


@pytest.mark.parametrize("alpha", [math.nan, -1.0, math.inf])
def test_an_alpha_that_is_no_size_holds_the_step(alpha):
    given = {"proposal": Proposal(True), "batch": None, "model": None, "device": None, "forward": None, "along": None}
    context = UpdateContext(version=0, alpha=alpha, **given)
    assert context.decided() is None and str(alpha) in context.held
    context = UpdateContext(version=0, alpha=1.0, **given)
    context.hold("")
    assert context.decided() is None


def test_a_step_too_short_for_bf16_is_made_longer(monkeypatch):
    told = Told(None, [0.0, 1e-9])
    context = one_update(control(kl_probe="fd"), monkeypatch, told)
    assert told.epsilons[:2] == [1.0, 100.0] and context.alpha == 3.0
    assert told.epsilons[-1] ** 2 * 1e-9 == pytest.approx(PROBE_KL)


def test_differences_find_their_step_and_keep_it(monkeypatch):
    made = control(kl_probe="fd")
    first = Told(None, [1e-6, 1e-3, 1e-3])
    one_update(made, monkeypatch, first)
    assert first.epsilons == [
        1.0,
        pytest.approx(math.sqrt(PROBE_KL / 1e-6)),
        pytest.approx(math.sqrt(PROBE_KL / 1e-3)),
    ]
    second = Told(None, [1.1e-3])
    one_update(made, monkeypatch, second)
    assert second.epsilons == [pytest.approx(math.sqrt(PROBE_KL / 1e-3))]
    again = control(kl_probe="fd")
    again.load_state_dict(made.state_dict())
    third = Told(None, [1.1e-3])
    one_update(again, monkeypatch, third)
    assert third.epsilons == [pytest.approx(math.sqrt(PROBE_KL / 1.1e-3))]


def test_a_callback_named_twice_is_refused():
    with pytest.raises(ConfigError, match="named twice"):
        load_callbacks((f"{__name__}:Good", f"{__name__}:Good"))


@pytest.mark.parametrize("q", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("probe", ["jvp", "fd"])
def test_a_q_that_is_no_number_holds_the_step(monkeypatch, q, probe):
    context = one_update(control(kl_probe=probe), monkeypatch, Told(q, [q] * 4))
    assert "not finite" in context.held and "logra/realized_kl" not in context.metrics


def test_a_flat_direction_has_alpha_1(monkeypatch):
    for probe in ("jvp", "fd"):
        context = one_update(control(kl_probe=probe), monkeypatch, Told(0.0, [0.0] * 4))
        assert context.alpha == 1.0 and not context.held


# ---- mismatch -------------------------------------------------------------------------------------------------------


def arguments(temperature=1.0, top_p=1.0, correction="off"):
    return SimpleNamespace(
        rollout=SimpleNamespace(temperature=temperature, top_p=top_p),
        algo=SimpleNamespace(advantage=SimpleNamespace(is_correction_level=correction)),
    )


@pytest.mark.parametrize(
    "given, mode",
    [
        ({}, log_probs.PROCESSED),
        ({"temperature": 0.7}, log_probs.PROCESSED),
        ({"temperature": 0.7, "correction": "seq"}, log_probs.PROCESSED),  # as the host has it then
        ({"top_p": 0.9}, log_probs.RAW),
        ({"top_p": 0.9, "correction": "token"}, None),
        ({"temperature": 0.7, "top_p": 0.9}, None),
    ],
)
def test_log_probs_are_the_policys_at_the_rollouts_temperature(given, mode):
    assert log_probs.mode(arguments(**given)) == mode
    assert log_probs.use(arguments(**given), LograConfig()) == (mode is not None)
    off = (LograConfig(kl_disable=True), LograConfig(kl_no_mismatch_subtraction=True), LograConfig(method="dense"))
    assert not any(log_probs.use(arguments(**given), config) for config in off)


def test_vllm_names_these_modes():
    from typing import get_args

    from vllm.config.model import LogprobsMode

    assert {log_probs.RAW, log_probs.PROCESSED} <= set(get_args(LogprobsMode))


@pytest.mark.parametrize(
    "asked, stock, expected", [(log_probs.RAW, None, 0), (log_probs.RAW, 1, 1), (None, None, None)]
)
def test_the_rollout_actor_asks_for_them(asked, stock, expected):
    made = rollout_actor.LograRolloutRayActor.__new__(rollout_actor.LograRolloutRayActor)
    made._log_probs, made._known_version = asked, asyncio.Event()
    seen = []

    class Executor:
        async def execute(self, sampling_params, **_):
            seen.append(sampling_params.logprobs)

    made.executor = Executor()
    sampling = SimpleNamespace(logprobs=stock)
    given = {"prompt": "", "label": "", "max_length": 8, "hf_tokenizer": None, "num_samples": 2}
    asyncio.run(made.generate_responses(sampling_params=sampling, **given))
    assert seen == [expected, expected]


def trainer_with(items):
    made = trainer_actor.LograActorPPOTrainer.__new__(trainer_actor.LograActorPPOTrainer)
    observed, said = [], []
    made._observes = True
    made.strategy = SimpleNamespace(kl_control=SimpleNamespace(observe_mismatch=observed.append), print=said.append)
    made.replay_buffer = SimpleNamespace(items=items)
    made._observe_mismatch()
    return made, observed, said


def item(difference, actions, truncated=False, log_probs_came=True):
    ours = torch.linspace(-2, -1, len(actions))
    theirs = ours + torch.tensor(difference) if log_probs_came else None
    return Experience(
        action_log_probs=ours,
        rollout_log_probs=theirs,
        action_mask=torch.tensor(actions).bool(),
        truncated=torch.tensor(truncated),
    )


def test_the_mismatch_is_a_mean_over_tokens_of_completed_responses():
    items = [item([9.0, 1.0, 2.0], [0, 1, 1]), item([3.0], [1]), item([100.0], [1], truncated=True)]
    _, observed, said = trainer_with(items)
    assert observed == [pytest.approx(2.0)] and said == []
    assert trainer_with([item([100.0], [1], truncated=True)])[1:] == ([], [])


def test_without_log_probs_it_is_off_and_said_once():
    made, observed, said = trainer_with([item([1.0], [1]), item([1.0], [1], log_probs_came=False)])
    made._observe_mismatch()
    assert observed == [None] and len(said) == 1 and "no rollout log-probabilities" in said[0]


# ---- the controllers ------------------------------------------------------------------------------------------------


def training_controller(tiny_model, baseline="none", target=6.0):
    """Our training controller over a stock one, as OpenRLHF makes it, without models."""
    logra = SimpleNamespace(**{**vars(flat_flags()), "reward_baseline": baseline})
    args = SimpleNamespace(
        algo=SimpleNamespace(
            kl=SimpleNamespace(target=target, init_coef=0.01, horizon=10000),
            advantage=SimpleNamespace(estimator="reinforce", gamma=1.0, no_std_norm=False),
        ),
        logger=SimpleNamespace(wandb=SimpleNamespace(key=None), tensorboard_dir=None),
        ckpt=SimpleNamespace(best_metric_key=""),
        data=SimpleNamespace(disable_fast_tokenizer=False),
        rollout=SimpleNamespace(n_samples_per_prompt=1),
        reward=SimpleNamespace(
            clip_range=None, overlong_buffer_len=None, overlong_penalty_factor=1.0, stop_properly_penalty_coef=None
        ),
        train=SimpleNamespace(partial_rollout_enable=False),
        logra=logra,
    )
    queues = {"vllm_lock": None, "rollout_queue": None, "rollout_slots": None}
    return controller.LograTrainingActor(
        str(tiny_model), SimpleNamespace(args=args), None, None, None, None, None, **queues
    )


def flat_flags():
    import argparse

    from openrlhf.utils.config import hierarchize

    from openrlhf_logra.config import add_flags

    parser = argparse.ArgumentParser()
    add_flags(parser)
    return hierarchize(parser.parse_args([])).logra


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
    from models import make_model

    return make_model(tmp_path_factory.mktemp("model"))


def experiences(rewards):
    """One response each, three tokens of which the first two are actions."""
    return [
        Experience(
            index=[i],
            rewards=torch.tensor([reward]),
            kl=torch.zeros(1, 3),
            action_mask=torch.tensor([[1, 1, 0]]),
            info={"reward": torch.tensor([reward])},
        )
        for i, reward in enumerate(rewards)
    ]


def test_openrlhfs_own_kl_controller_is_untouched(tiny_model):
    made = training_controller(tiny_model)
    assert type(made.kl_ctl) is AdaptiveKLController
    assert made.experience_maker.kl_ctl is made.kl_ctl
    stock = AdaptiveKLController(0.01, 6.0, 10000)
    for current in (0.0, 3.0, 20.0):
        made.kl_ctl.update(current, 256)
        stock.update(current, 256)
    assert made.kl_ctl.value == stock.value != 0.01


def test_without_the_flag_advantages_are_stocks(tiny_model):
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

    ours, theirs = training_controller(tiny_model).experience_maker, training_controller(tiny_model).experience_maker
    theirs.__class__ = RemoteExperienceMaker
    rewards = (0.0, 1.0, 1.0, 3.0)
    both = zip(
        ours.compute_advantages_and_returns(experiences(rewards)),
        theirs.compute_advantages_and_returns(experiences(rewards)),
    )
    assert all(torch.equal(one.advantages, other.advantages) for one, other in both)


def test_the_running_baseline_is_all_that_is_subtracted(tiny_model):
    made = training_controller(tiny_model, "running")
    maker = made.experience_maker

    def advantages(rewards):
        found = maker.compute_advantages_and_returns(experiences(rewards))
        for one in found:
            assert one.advantages[0, 0] == one.advantages[0, 1] and one.advantages[0, 2] == 0
        return [float(one.advantages[0, 0]) for one in found]

    assert advantages((0.0, 1.0)) == pytest.approx([-0.5, 0.5])  # of the first batch itself
    assert advantages((1.0, 1.0)) == pytest.approx([0.5, 0.5])  # of the batch before
    assert advantages((3.0,)) == pytest.approx([2.25])
    assert made.args.algo.advantage.estimator == "reinforce"
    states = made._with_baseline({"global_step": 3})
    assert states["global_step"] == 3
    again = training_controller(tiny_model, "running")
    again.restore_best_checkpoint_state(states)
    assert again.experience_maker.baseline.state_dict() == maker.baseline.state_dict() == {"count": 5, "mean": 1.2}
    training_controller(tiny_model).restore_best_checkpoint_state(states)  # the flag was dropped: nothing to restore
    assert training_controller(tiny_model)._with_baseline(None) is None


def test_penalties_are_in_the_baseline_and_the_log_keeps_rewards(tiny_model):
    made = training_controller(tiny_model, "running")
    made.args.reward.stop_properly_penalty_coef = 0.5
    given = experiences((2.0, 4.0))
    for one, cut in zip(given, (True, False)):
        one.truncated = torch.tensor([cut])
    found = made.experience_maker.compute_advantages_and_returns(given)
    assert [float(one.advantages[0, 0]) for one in found] == [-1.5, 1.5]  # 1 and 4
    assert [float(one.info["reward"]) for one in found] == [1.0, 4.0]


def test_the_baseline_goes_into_every_checkpoint(tiny_model):
    made = training_controller(tiny_model, "running")
    made.args.ckpt.save_steps, made.args.logger.logging_steps = 1, 1
    kept = []

    def save(method_name, client_states, **_):
        kept.append(client_states)
        return []

    made.actor_model_group = SimpleNamespace(async_run_method=save)
    made.experience_maker.compute_advantages_and_returns(experiences((0.0, 1.0)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray.get", lambda references: references)
        made.save_logs_and_checkpoints(1, {}, {"global_step": 1})
        made.save_best_checkpoint({"eval_x_pass1": 0.5}, 1, {"global_step": 1})
    assert [one["logra_reward_baseline"] for one in kept] == [{"count": 2, "mean": 0.5}] * 2


def test_a_reward_that_is_not_finite_does_not_poison_the_mean():
    baseline = RunningBaseline()
    assert baseline.take(torch.tensor([math.nan, 1.0, 3.0, math.inf])) == 2.0
    assert baseline.take(torch.tensor([math.nan])) == 2.0 and baseline.state_dict() == {"count": 2, "mean": 2.0}
    assert RunningBaseline().take(torch.tensor([math.nan])) == 0.0
