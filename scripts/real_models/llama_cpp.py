"""Answers prompts with llama.cpp, in an environment that has it: JSON in, JSON out.

With the arguments FILE, PORT and THREADS it serves a model by HTTP, as llama.cpp does by default.
No import from this project: the reference shares nothing with the compared code.
"""

import json
import signal
import sys
from typing import Any
from urllib.request import Request, urlopen

import xllamacpp


def start(path: str, *, embeds: bool) -> xllamacpp.Server:
    """Load a model that computes, and keeps keys and values, in float32."""
    settings = xllamacpp.CommonParams()
    settings.model.path = path
    settings.n_ctx = 8192
    settings.embedding = embeds
    settings.n_parallel = 1
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    off = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.flash_attn_type = off
    settings.cpuparams.n_threads = 1
    return xllamacpp.Server(settings)


def serve(path: str, port: int, threads: int) -> None:
    """Serve a model with eight slots until this process is killed; other settings are default."""
    settings = xllamacpp.CommonParams()
    settings.model.path = path
    settings.port = port
    settings.n_parallel = 8
    settings.n_ctx = settings.n_parallel * 2048
    settings.cpuparams.n_threads = threads
    server = xllamacpp.Server(settings)
    while server:
        signal.pause()


def call(server: xllamacpp.Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Post JSON to the server that llama.cpp runs in this process."""
    headers = {"Content-Type": "application/json"}
    request = Request(server.listening_address + path, json.dumps(body).encode(), headers)  # noqa: S310
    with urlopen(request) as reply:  # noqa: S310 (its own address)
        return json.load(reply)


def ids(server: xllamacpp.Server, text: str, *, whole: bool) -> list[int]:
    """Tokenise; `whole` adds the tokens that a prompt starts with."""
    body = {"content": text, "add_special": whole, "parse_special": True}
    return call(server, "/tokenize", body)["tokens"]


def reply(server: xllamacpp.Server, text: str, tokens: int, top: int) -> dict[str, Any]:
    """Decode greedily up to where the model would end.

    Returns:
        The ids of `prompt` and `reply`, and for each of these in `top` the best ids with their
        log-probabilities. llama.cpp leaves some out where a character takes several tokens: `top`
        is empty then.
    """
    prompt = ids(server, text, whole=True)
    body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "n_probs": top}
    asked = {**body, "cache_prompt": False, "ignore_eos": True, "return_tokens": True}
    answer = call(server, "/completion", asked)
    chosen = answer["tokens"]
    best = [
        [(one["id"], round(one["logprob"], 5)) for one in each["top_logprobs"]]
        for each in answer["completion_probabilities"]
    ]
    if len(best) < len(chosen):
        return {"prompt": prompt, "reply": chosen, "top": []}
    ends = [n for n, (first, *_) in enumerate(best) if first[0] != chosen[n]]
    count = min([*ends, len(chosen)])
    return {"prompt": prompt, "reply": chosen[:count], "top": best[:count]}


def embed(server: xllamacpp.Server, tokens: list[int]) -> list[float]:
    """Return the vector of length 1 for a text that is given as ids."""
    (answer,) = server.handle_embeddings({"input": tokens})["data"]
    return [round(value, 5) for value in answer["embedding"]]


def main() -> None:
    """Answer the question on standard input, or serve."""
    if sys.argv[1:]:
        path, port, threads = sys.argv[1:]
        serve(path, int(port), int(threads))
    question = json.load(sys.stdin)
    embedded = question.get("embedded", [])
    server = start(question["model"], embeds=bool(embedded))
    replies = {
        name: reply(server, text, question["tokens"], question["top"])
        for name, text in question.get("prompts", {}).items()
    }
    texts = [ids(server, text, whole=False) for text in question.get("texts", [])]
    vectors = [embed(server, tokens) for tokens in embedded]
    json.dump({"texts": texts, "replies": replies, "vectors": vectors}, sys.stdout)


if __name__ == "__main__":
    main()
