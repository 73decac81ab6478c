import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from grammar_driver import accepts, compile_text

from backend.sampling.grammar.compiler import GrammarCompiler
from common.last_used import LastUsed

ROOT = Path(__file__).parents[3]


def test_a_text_that_begins_with_a_brace_is_a_schema(compiler):
    assert accepts(compile_text(compiler, ' \n{"type":"null"}'), "null")
    assert accepts(compile_text(compiler, '# {\nroot ::= "null"'), "null")


def test_a_grammar_is_compiled_once_whatever_the_order_of_its_rules(vocabulary):
    compiler = GrammarCompiler(vocabulary)
    one = compile_text(compiler, 'root ::= a b\na ::= "x"\nb ::= "y"')
    assert compile_text(compiler, 'b ::= "y"\nroot ::= first b # same\nfirst ::= "x"') is one
    assert compile_text(compiler, 'root ::= a b\na ::= "x"\nb ::= "z"') is not one


def test_a_schema_is_compiled_once_whatever_its_spacing(vocabulary):
    compiler = GrammarCompiler(vocabulary)
    one = compile_text(compiler, '{"type":"object","properties":{"a":{},"b":{}}}')
    assert compile_text(compiler, '{ "type": "object",\n"properties": {"a":{}, "b":{}}}') is one
    # The order of properties is that of the reply.
    assert compile_text(compiler, '{"type":"object","properties":{"b":{},"a":{}}}') is not one


def test_what_was_used_longest_ago_is_dropped_first():
    kept = LastUsed(2)
    kept.keep("a", 1)
    kept.keep("b", 2)
    assert kept.find("a") == 1
    kept.keep("c", 3)
    assert (kept.find("a"), kept.find("b"), kept.find("c")) == (1, None, 3)
    kept.keep("a", 4)
    kept.keep("d", 5)
    assert (kept.find("a"), kept.find("c"), kept.find("d")) == (4, None, 5)


def test_large_values_push_out_several_but_never_themselves():
    kept = LastUsed(9, 10, lambda key, _: len(key))
    for key in ("a" * 4, "b" * 4, "b" * 4, "c" * 6):
        kept.keep(key, key)
    assert [kept.find(key * n) is None for key, n in (("a", 4), ("b", 4), ("c", 6))] == [
        True,
        False,
        False,
    ]
    kept.keep("d" * 11, 1)
    assert (kept.find("d" * 11), kept.find("c" * 6)) == (1, None)
    kept.keep("e", 2)
    assert (kept.find("d" * 11), kept.find("e")) == (None, 2)


def test_matchers_of_one_grammar_do_not_meet(compiler):
    compiled = compile_text(compiler, 'root ::= "ab"')
    one, other = compiled.matcher(), compiled.matcher()
    assert one.consume(ord("a"))
    assert not other.consume(ord("b"))
    assert one.consume(ord("b"))
    assert one.is_accepting
    assert other.error
    assert accepts(compiled, "ab")


def test_threads_may_compile_and_copy_at_once(vocabulary):
    compiler = GrammarCompiler(vocabulary, max_kept=3)

    def work(number):
        word = f"word{number % 5}"
        compiled = compile_text(compiler, f'root ::= "{word}" ("(" root ")")?')
        return accepts(compiled, f"{word}({word})")

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(200)))


def test_compiling_leaves_the_stacks_of_other_threads_alone(compiler):
    before = threading.stack_size()
    compile_text(compiler, 'root ::= "stack"')
    assert threading.stack_size() == before


def test_a_caller_with_a_small_stack_may_compile_a_deep_grammar(compiler):
    text = "root ::= r0\n" + "".join(f'r{n} ::= "(" r{n + 1} ")"\n' for n in range(450))
    text += 'r450 ::= "x" | "[" root "]"'
    outcome = []
    usual = threading.stack_size(512 * 1024)
    try:
        thread = threading.Thread(target=lambda: outcome.append(compile_text(compiler, text)))
        thread.start()
    finally:
        threading.stack_size(usual)
    thread.join()
    assert outcome


def test_importing_grammars_does_not_import_mlx_or_numpy():
    code = (
        "import sys, backend.sampling.grammar.compiler\n"
        "heavy = {'mlx', 'numpy', 'transformers'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
