from __future__ import annotations

import io

import pytest

from sylvan import lang as sgl
from sylvan.lang.function import SglFunction, resolve_backend
from sylvan.lang.progress import ProgressBar
from sylvan.lang.run import batch_threads
from sylvan.lang.settings import global_config

LONG = "This prefix is long enough that it is worth a request of its own to cache it. "


@sgl.function
def qa(s, question, suffix="?"):
    s += LONG + question + suffix + sgl.gen("answer", stop=".")


def test_decorator_works_with_and_without_parentheses():
    @sgl.function(num_api_spec_tokens=8)
    def program(s):
        """Nothing."""

    assert isinstance(program, SglFunction)
    assert program.num_api_spec_tokens == 8
    assert (qa.arg_names, qa.arg_defaults) == (["question", "suffix"], ("?",))


def test_first_parameter_must_be_s():
    with pytest.raises(TypeError, match='"s"'):
        sgl.function(lambda x: None)


def test_run_takes_sampling_parameters_and_arguments():
    backend = sgl.Scripted("yes. no")

    state = qa.run("a", suffix="!", temperature=0.2, max_new_tokens=5, backend=backend)

    assert state["answer"] == "yes"
    assert backend.calls[0].text == LONG + "a!"
    params = backend.calls[0].params
    assert (params.temperature, params.max_new_tokens, params.stop) == (0.2, 5, ".")
    assert params.frequency_penalty == 0.0


def test_bind_gives_arguments_and_keeps_the_rest():
    @sgl.function(num_api_spec_tokens=8)
    def program(s, a, b):
        s += a + b

    bound = program.bind(b="2")

    assert bound.run("1", backend=sgl.Scripted()).text() == "12"
    assert bound.num_api_spec_tokens == 8
    with pytest.raises(TypeError, match="'c'"):
        program.bind(c=1)


def test_backend_comes_from_the_call_or_the_default():
    with pytest.raises(ValueError, match="specify a backend"):
        qa.run("a")
    sgl.set_default_backend(sgl.Scripted("d"))
    assert qa("a")["answer"] == "d"
    assert qa.run("a", backend=sgl.Scripted("c"))["answer"] == "c"


def test_runtime_objects_stand_for_their_endpoint():
    class Holder:
        endpoint = sgl.Scripted("e")

    assert resolve_backend(Holder()) is Holder.endpoint
    with pytest.raises(TypeError, match="str is not a backend"):
        resolve_backend("http://localhost")


def test_cache_and_info_functions_use_the_default_backend():
    class Informed(sgl.Scripted):
        def flush_cache(self):
            return "flushed"

        def get_server_info(self):
            return {"version": 1}

    assert sgl.flush_cache() is False
    assert sgl.get_server_info() is None
    sgl.set_default_backend(Informed())
    assert sgl.flush_cache() == "flushed"
    assert sgl.get_server_info() == {"version": 1}
    assert sgl.get_server_info(sgl.Scripted()) is None


@pytest.mark.parametrize("num_threads", ["auto", 1, 3])
def test_batch_keeps_the_order_and_caches_the_common_prefix_first(num_threads):
    backend = sgl.Scripted(lambda text: text.removeprefix(LONG))

    states = qa.run_batch(
        [{"question": f"q{i}"} for i in range(20)], backend=backend, num_threads=num_threads
    )

    assert [state["answer"] for state in states] == [f"q{i}?" for i in range(20)]
    assert (backend.calls[0].kind, backend.calls[0].text) == ("cache", LONG)
    assert [call.kind for call in backend.calls[1:]] == ["generate"] * 20


def test_prefix_is_not_cached_for_one_program_a_short_text_or_when_off():
    @sgl.function
    def short(s, q):
        s += "short" + q

    backend = sgl.Scripted()
    short.run_batch([{"q": "a"}, {"q": "b"}], backend=backend)
    qa.run_batch([{"question": "a"}], backend=backend)
    global_config.enable_precache_with_tracing = False
    try:
        qa.run_batch([{"question": "a"}] * 2, backend=backend)
    finally:
        global_config.enable_precache_with_tracing = True

    assert "cache" not in [call.kind for call in backend.calls]


def test_batch_takes_tuples_in_the_order_of_arguments():
    backend = sgl.Scripted(lambda text: text[-2:])
    states = qa.run_batch([("a",), ("b", "!")], backend=backend)
    assert [state["answer"] for state in states] == ["a?", "b!"]
    assert qa.run_batch([], backend=backend) == []


@pytest.mark.parametrize("batch", [[()], [("a", "b", "c")], ["ab"], {"question": "a"}])
def test_batch_refuses_arguments_that_do_not_fit(batch):
    with pytest.raises(TypeError):
        qa.run_batch(batch, backend=sgl.Scripted())


def test_batch_refuses_unknown_options():
    with pytest.raises(TypeError, match="temperature_"):
        qa.run_batch([("a",)], backend=sgl.Scripted(), temperature_=0)


def test_batch_generator_starts_programs_as_it_is_read():
    backend = sgl.Scripted("x")
    states = qa.run_batch(
        [{"question": f"{i}"} for i in range(450)],
        backend=backend,
        num_threads=2,
        generator_style=True,
    )
    assert next(states)["answer"] == "x"
    states.close()
    assert len(backend.calls) <= 1 + 200
    backend.calls.clear()
    assert len(list(qa.run_batch([("a",)] * 3, backend=backend, generator_style=True))) == 3


def test_one_failing_program_of_a_batch_leaves_the_others():
    def answer(text):
        if "bad" in text:
            raise OSError("down")
        return "fine"

    @sgl.function
    def program(s, q):
        s += q + sgl.gen("x")
        s += s["x"]

    states = program.run_batch([("good",), ("bad",), ("good",)], backend=sgl.Scripted(answer))

    assert [state.error() is None for state in states] == [True, False, True]
    assert states[2].text() == "goodfinefine"
    with pytest.raises(sgl.ProgramError, match="down"):
        states[1].text()


def test_what_a_program_of_a_batch_raises_is_raised():
    @sgl.function
    def program(s, q):
        raise LookupError(q)

    with pytest.raises(LookupError, match="a"):
        program.run_batch([("a",), ("b",)], backend=sgl.Scripted())


def test_number_of_batch_threads_is_bounded(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert batch_threads("auto", 1000) == 96
    assert batch_threads("auto", 10) == 10
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert batch_threads("auto", 10_000) == 1024
    for wrong in (0, "many"):
        with pytest.raises(ValueError, match="num_threads"):
            batch_threads(wrong, 10)


def test_progress_is_shown(capsys):
    qa.run_batch([("a",)] * 4, backend=sgl.Scripted(), progress_bar=True)
    assert "4/4 programs" in capsys.readouterr().err
    out = io.StringIO()
    bar = ProgressBar(2, out)
    bar.update()
    bar.close()
    assert "[###############...............] 1/2" in out.getvalue()


def test_verbosity_prints_the_text(capsys):
    global_config.verbosity = 2
    try:
        qa.run("a", backend=sgl.Scripted("b"))
    finally:
        global_config.verbosity = 0
    assert capsys.readouterr().out == LONG + "a?b\n"


def test_regex_is_checked_when_the_program_is_written():
    import re

    with pytest.raises(re.error):
        sgl.gen("x", regex="(")
    with pytest.warns(UserWarning, match="dtype"):
        sgl.gen("x", regex="a", dtype=int)
    with pytest.raises(ValueError, match="choices"):
        sgl.select("x")
    with pytest.raises(TypeError, match="strings"):
        sgl.select("x", [1, 2])
    with pytest.raises(ValueError, match="num_frames"):
        sgl.video("x.mp4", 0)
    assert sgl.gen_int("x", 5).params["dtype"] == "int"
    assert sgl.gen_string("x").params["dtype"] == "str"


def test_unknown_names_of_the_package_are_attribute_errors():
    with pytest.raises(AttributeError):
        sgl.NoSuchBackend  # noqa: B018
    for name in sgl.__all__:
        if name != "Engine":
            assert getattr(sgl, name) is not None
