"""API speculation: one call to a completion API serves several gens.

Works with any service behind the OpenAI API; here the same server, through `/v1`. Needs the extra
`openai`.
"""

from __future__ import annotations

import argparse

import sylvan as sgl

CARDS = """Name: Ada Lovelace
Born: 1815
Job: mathematician

Name: Alan Turing
Born: 1912
Job: computer scientist

"""


def fields(s, name):
    s += CARDS + "Name: " + name + "\nBorn:" + sgl.gen("born", max_tokens=12, stop="\n")
    s += "\nJob:" + sgl.gen("job", max_tokens=12, stop="\n")


plain = sgl.function(fields)
speculative = sgl.function(fields, num_api_spec_tokens=32)


def run(backend, name="Grace Hopper"):
    states = [program.run(name, backend=backend, temperature=0) for program in (plain, speculative)]
    return [(state["born"], state["job"]) for state in states]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:30000")
    args = parser.parse_args()
    backend = sgl.OpenAI(
        "default", is_chat_model=False, base_url=args.base_url + "/v1", api_key="none"
    )
    for label, (born, job) in zip(("plain", "speculative"), run(backend), strict=True):
        print(f"{label:>12}: born{born}, job{job}")
    print(f"{backend.token_usage}")


if __name__ == "__main__":
    main()
