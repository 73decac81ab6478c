"""Texts that real models are asked about, by the tests and by the maker of their references."""

CAPITAL = "The capital of France is"
# Replies to these are compared token by token.
PROMPTS = {
    "capital": CAPITAL,
    "digits": "Rules\n\n1. Only 12345\n2. Never 67890\n3.",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "yaml": "services:\n  web:\n    image: nginx:1.27\n    ports: [8080]\n  db:\n    image:",
    "french": "La révolution française a commencé en",
    "japanese": "日本の首都は東京です。フランスの首都は",
    "chat": ("<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n"),
}
_NOTES = [
    f"Note {n}: on day {n * 7 % 365} the river stood {n * 13 % 90} cm above its mark, "
    f"and {n % 9 + 2} boats passed the bridge.\n"
    for n in range(1, 195)
]
# Of about 3,000 and 6,000 tokens; the longer one begins with the other.
LONG_PROMPTS = {"long": "".join(_NOTES[:100]), "longer": "".join(_NOTES)}
# Each of another script or kind; models read them joined, too.
TEXTS = (
    "Rules\n\n1. Only 12345, 6789.01 and 2^64 = 18446744073709551616",
    "  two, \t tabs\t\tand\r\nlines \n\n\n at the end   ",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # 0xFF\n",
    'a:\n  - b: [1, 22, 333]\n    c: {d: ~, e: "f"}\n',
    '{"key": [1.5e-10, null, true], "näme": "\\u00e9\\n"}',
    "<div class='x'>&nbsp;</div> https://example.org/?q=1&r=%20",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><bos><eos>",
    "Straße, naïve, Ærøskøbing, İstanbul, e\u0301\u0323",
    "Ελληνικά γράμματα 2024",
    "Съешь ещё этих мягких французских булок 33",
    "العربية ١٢٣ من اليمين",
    "עברית עם 45 מספרים",
    "हिन्दी में १२३ संख्या",
    "বাংলা ভাষা ৪৫৬",
    "ภาษาไทย ๑๒๓ ไม่มีช่องว่าง",
    "日本語のテキスト、カタカナ１２３",
    "中文文本，没有空格。4567",
    "한국어 텍스트 890",
    "ქართული და Հայերեն",
    "🎉👩‍👩‍👧 🏳️‍🌈 ½ ﬁ ™ \u00a0\u2028\u200b end",
)
