# ruff: noqa: PLW2901 - `state += ...` is how programs append
"""Programs in the common language, run as `lang_programs.py PACKAGE URL` by the request test.

The file knows nothing of the package that runs it: `sylvan`, or SGLang's published one, of which
only the frontend is imported (its package root needs the whole runtime).
"""

from __future__ import annotations

import importlib.util
import sys
import types


def load(package):
    if package == "sylvan":
        import sylvan.lang

        return sylvan.lang
    spec = importlib.util.find_spec("sglang")
    root = types.ModuleType("sglang")
    root.__path__ = list(spec.submodule_search_locations)
    sys.modules["sglang"] = root
    from sglang.lang import api
    from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
    from sglang.lang.choices import (
        greedy_token_selection,
        token_length_normalized,
        unconditional_likelihood_normalized,
    )

    names = {name: getattr(api, name) for name in dir(api) if not name.startswith("_")}
    names |= {
        "RuntimeEndpoint": RuntimeEndpoint,
        "greedy_token_selection": greedy_token_selection,
        "token_length_normalized": token_length_normalized,
        "unconditional_likelihood_normalized": unconditional_likelihood_normalized,
    }
    return types.SimpleNamespace(**names)


def plain(sgl, backend):
    @sgl.function
    def every_parameter(s):
        s += "Once" + sgl.gen(
            "x", max_tokens=7, min_tokens=1, stop=["a", "b"], stop_token_ids=[3], stop_regex="c+",
            temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, frequency_penalty=0.2,
            presence_penalty=0.3, ignore_eos=True, return_logprob=True, logprob_start_len=0,
            top_logprobs_num=2, return_text_in_logprobs=True,
        )  # fmt: skip
        s += " upon" + sgl.gen("y", regex="[a-z]+", stop="\n")
        s += " a" + sgl.gen("z", json_schema='{"type": "object"}')
        s += sgl.gen()

    @sgl.function
    def typed(s):
        for dtype in (int, "float", str, bool):
            s += f"{dtype}: " + sgl.gen("x", dtype=dtype)
            s += s["x"]
        s += sgl.gen_int("i", 5) + sgl.gen_string("s", 6)

    every_parameter.run(backend=backend)
    every_parameter.run(
        backend=backend, max_new_tokens=3, temperature=0, stop="S", top_k=2, return_logprob=True
    )
    typed.run(backend=backend, stop=["end"])


def chat(sgl, backend):
    @sgl.function
    def turns(s, first, *, second="And then?"):
        s += sgl.user(first)
        s += sgl.assistant(sgl.gen("a", max_tokens=16))
        with s.user():
            s += second
        with s.assistant():
            s += "Well, "
            with s.var_scope("scope"):
                s += sgl.gen("b", stop=".")
        s += sgl.user_begin() + "Last" + sgl.user_end()
        s += sgl.assistant_begin()
        s += sgl.gen("c")
        s += sgl.assistant_end()
        s += sgl.user("So: " + s["scope"])

    @sgl.function
    def told(s):
        s += sgl.system("Be brief.")
        s += sgl.user("Hi")
        s += sgl.assistant(sgl.gen("x"))

    turns.run("Hello", backend=backend, temperature=0)
    turns.bind(first="Bound").run(backend=backend)
    state = told.run(backend=backend, stream=True)
    for _ in state.text_iter("x"):
        pass
    state.sync()


def parallel(sgl, backend):
    @sgl.function
    def tips(s, n):
        s += sgl.user("Tips?")
        s += sgl.assistant(sgl.gen("intro"))
        s.sync()
        forks = s.fork(n)
        forks += lambda i: f"Tip {i}: "
        forks += sgl.gen("tip", max_tokens=9)
        forks.join()
        for tip in s["tip"]:
            s += "- " + tip + "\n"
        with s.copy() as other:
            other += "Aside" + sgl.gen("aside")
        s += sgl.gen("end")

    tips.run(3, backend=backend)


def batch(sgl, backend):
    examples = "Classify the review as positive or negative, as in these examples.\n" * 3

    @sgl.function
    def few_shot(s, review, suffix="\nLabel:"):
        s += examples + "Review: "
        s += review
        s += suffix + sgl.gen("label", max_tokens=2, stop="\n")

    @sgl.function
    def few_shot_chat(s, review):
        s += sgl.user(examples + review)
        s += sgl.assistant(sgl.gen("label"))

    few_shot.run_batch([{"review": f"r{i}"} for i in range(5)], backend=backend, num_threads=2)
    few_shot.run_batch([("a",), ("b", "!")], backend=backend, temperature=0)
    few_shot_chat.run_batch([{"review": f"r{i}"} for i in range(3)], backend=backend)
    few_shot.cache(backend=backend)


def choices(sgl, backend):
    @sgl.function
    def choosing(s, method):
        s += "The sky is " + sgl.select("x", ["deep blue", "red"], choices_method=method)
        s += " and the sea is " + sgl.gen("y", choices=["green", "grey"], choices_method=method)
        s += "." + sgl.gen("z")

    for method in (
        sgl.token_length_normalized,
        sgl.greedy_token_selection,
        sgl.unconditional_likelihood_normalized,
    ):
        choosing.run(method, backend=backend)


def pictures(sgl, backend):
    @sgl.function
    def looking(s, path):
        s += sgl.user(sgl.image(path) + "What is it?")
        s += sgl.assistant(sgl.gen("x"))
        s += sgl.user("Sure?") + sgl.assistant(sgl.select("y", ["yes", "no"]))

    looking.run(__file__, backend=backend)


def control(sgl, backend):
    sgl.flush_cache(backend)
    sgl.get_server_info(backend)
    sgl.set_default_backend(backend)
    sgl.flush_cache()
    backend.start_profile()
    backend.stop_profile()


PROGRAMS = (plain, chat, parallel, batch, choices, pictures, control)


def main():
    package, url, name = sys.argv[1:]
    sgl = load(package)
    backend = sgl.RuntimeEndpoint(url, api_key="k")
    next(program for program in PROGRAMS if program.__name__ == name)(sgl, backend)


if __name__ == "__main__":
    main()
