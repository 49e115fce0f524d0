# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import json
import multiprocessing
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightlife import errors
from weightlife.errors import MissingTensorError, WeightlifeError, clean, from_message, names

# Codes are a promise: never renumber, never reuse. A new error is a new line here.
GOLDEN = {
    "WL000": "WeightlifeError",
    "WL001": "ConfigError",
    "WL010": "HostError",
    "WL011": "NotInstalledError",
    "WL012": "ActiveSessionError",
    "WL013": "HandshakeError",
    "WL014": "RoutingError",
    "WL015": "ReloadUnsupportedError",
    "WL100": "SessionError",
    "WL101": "SessionConflictError",
    "WL102": "SessionStateError",
    "WL103": "SessionFailedError",
    "WL104": "PoisonedModelError",
    "WL105": "EngineNotPausedError",
    "WL200": "CompletenessError",
    "WL201": "MissingTensorError",
    "WL202": "SurplusTensorError",
    "WL203": "UnexpectedTensorError",
    "WL204": "ShapeMismatchError",
    "WL205": "DtypeMismatchError",
    "WL206": "HalfTouchedLayerError",
    "WL207": "BypassError",
    "WL208": "EmptyUpdateError",
    "WL209": "NonFiniteError",
    "WL210": "DigestMismatchError",
    "WL211": "LoaderChangedError",
    "WL212": "WrongPartError",
    "WL220": "SourceError",
    "WL221": "TruncatedSourceError",
    "WL222": "SourceIndexError",
    "WL223": "RepeatedSourceError",
    "WL224": "ChangedSourceError",
    "WL300": "StorageError",
    "WL301": "StorageMovedError",
    "WL302": "RefusedLayerError",
    "WL303": "BudgetError",
    "WL304": "NotAdoptableError",
    "WL305": "StaleDerivedError",
    "WL400": "ProcessingError",
    "WL401": "DoubleProcessingError",
    "WL403": "EarlyProcessingError",
    "WL402": "UnprocessedLayerError",
    "WL501": "RankMismatchError",
}
CLASSES = [errors.CODES[code] for code in GOLDEN]


def make(cls: type[WeightlifeError] = MissingTensorError) -> WeightlifeError:
    return cls(
        "2 tensors did not arrive",
        model="Qwen3ForCausalLM",
        layer="model.layers.0.mlp",
        tensors=["model.layers.0.mlp.up_proj.weight", "b"],
        session="reload#3",
        hint="resend (all of it), then retry",
    )


def fields(error: WeightlifeError | None) -> dict[str, object]:
    return vars(error)


def test_codes_are_unique_and_stable() -> None:
    assert {code: cls.__name__ for code, cls in errors.CODES.items()} == GOLDEN


def test_every_class_is_exported_and_drawn_in_the_tree() -> None:
    for code, cls in errors.CODES.items():
        assert cls.__name__ in errors.__all__
        assert getattr(errors, cls.__name__) is cls
        assert any(cls.__name__ in line and code in line for line in (errors.__doc__ or "").splitlines())


def test_a_code_can_not_be_used_twice() -> None:
    with pytest.raises(TypeError, match="both use the code WL201"):
        type("Other", (WeightlifeError,), {"code": "WL201"})
    with pytest.raises(TypeError, match="three digits"):
        type("Odd", (WeightlifeError,), {"code": "X1"})
    assert errors.CODES["WL201"] is MissingTensorError


def test_config_error_is_a_value_error() -> None:
    assert issubclass(errors.ConfigError, ValueError)


def test_text_of_an_error() -> None:
    assert str(make()) == (
        "[WL201] 2 tensors did not arrive (model=Qwen3ForCausalLM, layer=model.layers.0.mlp, "
        "tensors=[model.layers.0.mlp.up_proj.weight, b], session=reload#3; next: resend (all of it), then retry)"
    )


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_has_a_next_step_and_a_message_of_its_own(cls: type[WeightlifeError]) -> None:
    error = cls()
    assert error.message
    assert error.hint == cls.default_hint
    assert f"next: {error.hint}" in str(error)
    assert from_message(str(error)).hint == error.hint  # type: ignore[union-attr]


@pytest.mark.parametrize("cls", CLASSES)
def test_round_trip_by_text(cls: type[WeightlifeError]) -> None:
    error = make(cls)
    back = from_message(str(error))
    assert type(back) is cls
    assert fields(back) == fields(error)
    assert str(back) == str(error)


@pytest.mark.parametrize("cls", CLASSES)
def test_copies_and_travels_through_a_pipe(cls: type[WeightlifeError]) -> None:
    error = make(cls)
    error.layer = "filled in later"
    # hosts pickle exceptions, as a multiprocessing pipe does
    receiver, sender = multiprocessing.Pipe(duplex=False)
    with receiver, sender:
        sender.send(error)
        received = receiver.recv()
    for other in (copy.copy(error), copy.deepcopy(error), received):
        assert type(other) is cls
        assert fields(other) == fields(error)
        assert str(other) == str(error)


def test_a_subclass_without_a_code_reads_back_as_its_parent() -> None:
    class Mine(MissingTensorError):
        pass

    assert type(from_message(str(Mine("x")))) is MissingTensorError


@pytest.mark.parametrize(
    "wrap",
    [
        "Worker failed with error '{}', please check the stack trace above for the root cause",
        "Call to collective_rpc method failed: {}",
        "(EngineCore pid=12) ERROR 11-29 [core.py:1] [x] {} (and more)",
        "first line\n{}\nlast line (model=Wrong; next: wrong)",
        'File "x.py", line 3\n    raise [WL999]\n{}',
    ],
)
def test_nested_in_other_text(wrap: str) -> None:
    error = make()
    assert fields(from_message(wrap.format(error))) == fields(error)


def test_nested_in_repr_and_json() -> None:
    error = make()
    text = str(error)
    for _ in range(3):
        text = json.dumps({"error": repr(RuntimeError(text))})
    assert fields(from_message(text)) == fields(error)


def test_an_error_that_quotes_another_one_is_still_itself() -> None:
    inner = make()
    outer = errors.SessionFailedError(
        f"an earlier session failed: {inner}", session="s2", hint=f"see {inner}"
    )
    back = from_message(f"RuntimeError: {outer}")
    assert type(back) is errors.SessionFailedError
    assert (back.session, back.model, back.layer, back.tensors) == ("s2", "", "", ())
    assert fields(back) == fields(outer)
    bare = from_message(str(errors.SessionFailedError(str(inner))))
    assert type(bare) is errors.SessionFailedError
    assert bare.model == ""


def test_of_a_chained_traceback_the_last_exception_counts() -> None:
    def fail() -> None:
        try:
            raise make()
        except WeightlifeError as error:
            raise errors.PoisonedModelError("undo failed", model="M") from error

    with pytest.raises(errors.PoisonedModelError) as caught:
        fail()
    text = "".join(traceback.format_exception(caught.value))
    assert type(from_message(text)) is errors.PoisonedModelError

    def host() -> None:
        try:
            raise make()
        except WeightlifeError as error:
            raise KeyError("host") from error

    with pytest.raises(KeyError) as other:
        host()
    assert type(from_message("".join(traceback.format_exception(other.value)))) is MissingTensorError


def test_of_several_errors_the_first_counts() -> None:
    text = f"rank 0: {errors.RankMismatchError('a')} rank 1: {make()}"
    back = from_message(text)
    assert type(back) is errors.RankMismatchError
    assert (back.message, back.model) == ("a", "")


def test_a_message_may_quote_a_traceback() -> None:
    quoted = "KeyError\n\nThe above exception was the direct cause of the following exception:\n\nValueError"
    error = errors.SessionFailedError(quoted, model="M")
    assert "KeyError | The above exception" in error.message
    assert fields(from_message(f"log\n{error}\n")) == fields(error)


def test_damaged_percent_encoding_is_left_as_it_is() -> None:
    back = from_message("[WL201] x (model=a%FF, layer=%E5%98%BF; next: y)")
    assert back is not None
    assert (back.model, back.layer) == ("a%FF", "\u563f")


@pytest.mark.parametrize("text", ["", "nothing", "[WL999] no such code", "WL201", "[WL20", "[wl201] x"])
def test_text_without_an_error(text: str) -> None:
    assert from_message(text) is None


def test_every_truncation_gives_whole_values_or_none() -> None:
    error = make()
    text = str(error)
    for cut in range(len(text) + 1):
        for tail in ("", "...", "... [truncated]", "…\n(see log)"):
            back = from_message(text[:cut] + tail)
            if cut < len("[WL201]"):
                assert back is None
                continue
            assert type(back) is MissingTensorError
            assert back.model in ("", error.model)
            assert back.layer in ("", error.layer)
            assert back.session in ("", error.session)
            assert set(back.tensors) <= set(error.tensors)


def test_many_tensors_are_capped_and_counted() -> None:
    error = MissingTensorError("x", tensors=[f"t{i}" for i in range(20)])
    assert "t7, +12 more]" in str(error)
    back = from_message(str(error))
    assert back is not None
    assert back.tensors == error.tensors[:8]
    assert back.omitted == 12
    assert str(back) == str(error)


def test_a_tensor_that_is_named_like_a_code() -> None:
    back = from_message(str(MissingTensorError("x", tensors=["WL301"], session="s")))
    assert back is not None
    assert (back.tensors, back.session) == (("WL301",), "s")


def test_a_lone_name_is_not_a_list_of_letters() -> None:
    assert MissingTensorError("x", tensors="abc").tensors == ("abc",)


HOSTILE = [
    "a, b",
    "x) (model=Evil; next: rm -rf",
    "[WL301] fake (session=no; next: no)",
    "\x1b[31mred\x1b[0m",
    "line\nbreak\r",
    "\u202egnp.exe",
    "100%41%",
    "+3 more",
    "WL301",
    "'quote\"",
    "back\\slash",
    "<script>&amp;",
    "嘿.weight",
    "\ud800lone",
    "{0} %s",
    "",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_round_trip_and_can_not_break_out(name: str) -> None:
    error = MissingTensorError("x", model=name, layer=name, tensors=["a", name, "b"], session=name)
    text = str(error)
    assert text.isprintable()
    text.encode()
    back = from_message(json.dumps(repr(f"worker said '{text}'")))
    assert type(back) is MissingTensorError
    assert (back.model, back.layer, back.session) == (name, name, name)
    assert [item for item in back.tensors if item] == [item for item in ("a", name, "b") if item]


@pytest.mark.parametrize(
    "text", [*HOSTILE, "unbalanced ) here", "(next: ", "(next:", "( open", "%28 and %25", "a; next: b", ")("]
)
def test_hostile_prose_round_trips(text: str) -> None:
    error = errors.BypassError(text, model="M", hint=text)
    assert str(error).isprintable()
    back = from_message(f"<{error}> trailing (text)")
    assert type(back) is errors.BypassError
    assert fields(back) == fields(error)
    assert fields(from_message(str(back))) == fields(error)


@given(st.text(max_size=300), st.text(max_size=300), st.lists(st.text(min_size=1, max_size=100), max_size=12))
def test_any_text_round_trips(prose: str, name: str, tensors: list[str]) -> None:
    error = MissingTensorError(prose, model=name[:150], layer=name[:150], tensors=tensors, hint=prose)
    text = str(error)
    assert text.isprintable()
    back = from_message(f"RuntimeError: {text} end)")
    assert type(back) is MissingTensorError
    assert (back.message, back.hint) == (error.message, error.hint)
    assert (back.model, back.layer) == (error.model, error.layer)
    assert back.tensors == error.tensors[:8]
    assert back.omitted == max(0, len(tensors) - 8)


@given(st.text(alphabet="[]WL201() ,;=%+abc.modelnxt:\n", max_size=200))
def test_reading_never_raises(text: str) -> None:
    from_message(text)
    from_message(f"[WL201] x (model={text}")


def test_long_texts_are_capped() -> None:
    error = MissingTensorError("m" * 10_000, model="n" * 10_000, hint="h" * 10_000, tensors=["t" * 9999] * 99)
    assert len(str(error)) < 8_000
    assert from_message(str(error)) is not None


def test_names_for_people() -> None:
    assert names([]) == ""
    assert names(["a", "b"]) == "a, b"
    assert names((f"t{i}" for i in range(20)), limit=2) == "t0, t1 and 18 more"
    assert names(["a"] * 3, limit=0) == "3 names"
    assert names(["\x1b[2J", "a\nb"]) == "\\x1b[2J, a | b"


def test_clean_keeps_both_ends() -> None:
    assert clean("a" * 100 + "." * 100 + "z" * 100, limit=21) == "aaaaaaaaa...zzzzzzzzz"
    assert clean("嘿") == "嘿"
    assert clean("\n") == "\\x0a"
    assert clean("\u2066\U000e0001") == "\\u2066\\U000e0001"
