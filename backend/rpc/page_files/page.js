"use strict";

// Text enters the page only as text nodes: no server data is parsed as markup.

const POLL_MS = 1000;
const LOOKS_PER_CACHE_LOOK = 5;
const SHORTEST_WINDOW_S = 20;
const LONGEST_WINDOW_S = 120;
const MAX_ROWS = 40;
const ROW = 18;
const PIXELS_PER_LETTER = 7;
const MEMORY_HEIGHT = 140;
const SPAN_S = 300;
const PHASES = ["waiting", "prefilling", "active"];
const PARTS = ["weights", "kv_active", "prompt_cache", "media", "other", "mlx_cache"];
const PART_WORDS = {
  weights: "weights",
  kv_active: "running requests",
  prompt_cache: "prompt cache",
  media: "media",
  other: "computing",
  mlx_cache: "free, kept by MLX",
};
const CLAIMS = ["held", "running", "cached", "spare"];
const CLAIM_WORDS = ["weights and media", "running requests", "prompt cache", "rest of its budget"];
const LONG_TURN_S = 2;

const requests = new Map();
const memory = [];
let token = "";
let looks = 0;
let begunAt = null;
// Of the drawings, in CSS pixels: a letter is as large on a phone as on a screen.
let width = 900;
let labels = 250;

function measure() {
  width = Math.max(document.body.clientWidth - 32, 240);
  labels = Math.min(250, Math.round(width * 0.35));
}

function shortened(text, isPath = false) {
  const room = Math.floor(labels / PIXELS_PER_LETTER);
  if (text.length <= room) return text;
  // Names that are paths differ at their ends.
  return isPath ? `…${text.slice(1 - room)}` : `${text.slice(0, room - 1)}…`;
}

function part(id) {
  return document.getElementById(id);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function shape(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  return filled(made, attributes, children);
}

function drawing(height, title, ...shapes) {
  const box = { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title };
  return shape("svg", box, ...shapes);
}

function count(value) {
  return Number(value).toLocaleString("en");
}

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let size = Number(value);
  let unit = 0;
  while (size >= 1000 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${size.toFixed(unit ? 1 : 0)} ${units[unit]}`;
}

function share(some, all) {
  return Number(all) ? `${Math.round((100 * Number(some)) / Number(all))}%` : "0%";
}

function legend(id, names, texts = names) {
  const key = (name) => element("span", { class: `key ${name}` });
  part(id).replaceChildren(
    ...names.map((name, index) => element("span", {}, key(name), texts[index].replace("_", " "))),
  );
}

// The time window grows while the page is open.
function windowS(now) {
  begunAt ??= now;
  return Math.min(Math.max(now - begunAt, SHORTEST_WINDOW_S), LONGEST_WINDOW_S);
}

function placeOf(at, now, left) {
  return left + Math.max(0, 1 - (now - at) / windowS(now)) * (width - left);
}

function timeAxis(y, now, left) {
  return [
    shape("text", { class: "quiet", x: left, y }, `${Math.round(windowS(now))} s ago`),
    shape("text", { class: "quiet end", x: width, y }, "now"),
  ];
}

function table(names, rows) {
  const head = names.map((name) => element("th", {}, name));
  const body = rows.map((cells) => element("tr", {}, ...cells.map((cell) => element("td", {}, cell))));
  const whole = [element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body)];
  return element("div", { class: "wide" }, element("table", {}, ...whole));
}

// Requests -------------------------------------------------------------------

function noteRequests(report, now) {
  for (const told of report.requests) {
    const known = requests.get(told.request_id) ?? { spans: [] };
    const last = known.spans.at(-1);
    if (last?.phase === told.phase) {
      last.to = now;
    } else {
      if (last) last.to = now;
      known.spans.push({ phase: told.phase, from: now, to: now });
    }
    requests.set(told.request_id, { ...known, told });
  }
  for (const [id, known] of requests) {
    if (known.spans.at(-1).to < now - windowS(now)) requests.delete(id);
  }
}

function requestRow([id, known], index, now) {
  const x = (at) => placeOf(at, now, labels);
  const y = index * ROW;
  const { told } = known;
  const facts =
    `${id}: ${count(told.prompt_tokens)} prompt tokens, ` +
    `${share(told.cached_tokens, told.prompt_tokens)} ${told.hit_kind}, ` +
    `${count(told.generated_tokens)} generated`;
  const bars = known.spans.map((span) =>
    shape("rect", {
      class: span.phase,
      x: x(span.from),
      y: y + 3,
      width: Math.max(x(span.to) - x(span.from), 2),
      height: ROW - 6,
    }),
  );
  const label = shape("text", { x: 0, y: y + ROW - 5 }, shortened(id));
  return shape("g", {}, shape("title", {}, facts), label, ...bars);
}

// The numbers that have words, and are no part of nothing.
function totals(metrics) {
  const values = new Map(metrics.map((each) => [each.name, Number(each.value)]));
  const told = ({ name, kind, words, share_of: whole }) => {
    if (whole) return `${share(values.get(name), values.get(whole))} of ${count(values.get(whole))} ${words}`;
    return `${kind === "gauge" ? values.get(name).toFixed(1) : count(values.get(name))} ${words}`;
  };
  return metrics.filter((each) => each.words && (!each.share_of || values.get(each.share_of))).map(told);
}

// Why requests wait, as far as a snapshot tells.
function waitingReason(report) {
  if (!Number(report.waiting)) return "";
  const wanted = Number(report.memory.breakdown.kv_wanted ?? 0);
  if (report.state === "BUSY" && !report.model) return "until the model is loaded";
  if (wanted) return `for ${bytes(wanted)} more memory`;
  if (report.model && report.slots_taken >= report.model.max_slots) return "for one of the slots, all are taken";
  return "for their turn";
}

// What the command `status` shows, those in progress first.
function runningTable(report) {
  const ranks = ["active", "prefilling", "waiting"];
  const sorted = [...report.requests].sort((a, b) => ranks.indexOf(a.phase) - ranks.indexOf(b.phase));
  const rows = sorted.slice(0, MAX_ROWS).map((each) => {
    const begun = Number(each.generated_tokens) > 0;
    return [
      each.phase,
      count(each.prompt_tokens),
      `${share(each.cached_tokens, each.prompt_tokens)} ${each.hit_kind}`,
      count(each.generated_tokens),
      begun ? Number(each.tokens_per_s).toFixed(1) : "",
      begun ? `${count(Math.round(each.first_token_ms))} ms` : "",
      each.request_id,
    ];
  });
  return table(["phase", "prompt", "cached", "tokens", "tokens/s", "first after", "request"], rows);
}

function showRequests(report, now) {
  noteRequests(report, now);
  const newest = [...requests].slice(-MAX_ROWS);
  const rows = newest.map((each, index) => requestRow(each, index, now));
  const facts = [
    `${count(report.slots_taken)} of ${count(report.model?.max_slots ?? 0)} run`,
    `${count(report.waiting)} wait ${waitingReason(report)}`.trim(),
    ...totals(report.metrics),
  ];
  part("requests-facts").textContent = facts.join(" · ");
  part("running").replaceChildren(...(report.requests.length ? [runningTable(report)] : []));
  const none = element("p", { class: "quiet" }, "no recent request");
  const axis = timeAxis((rows.length + 1) * ROW - 4, now, labels);
  const drawn = () => drawing((rows.length + 1) * ROW, "requests over time", ...rows, ...axis);
  part("requests").replaceChildren(rows.length ? drawn() : none);
}

// Memory ---------------------------------------------------------------------

function memoryParts(breakdown) {
  const told = (name) => Number(breakdown[name] ?? 0);
  const known = PARTS.slice(0, 4).map(told);
  const other = told("mlx_active") - known.reduce((sum, each) => sum + each, 0);
  return [...known, Math.max(other, 0), told("mlx_cache")];
}

function band(index, highest, now) {
  const place = (sample, upTo) => {
    const x = placeOf(sample.at, now, 0);
    const height = sample.sizes.slice(0, upTo).reduce((sum, each) => sum + each, 0) / highest;
    return `${x.toFixed(1)},${((1 - height) * MEMORY_HEIGHT).toFixed(1)}`;
  };
  const upper = memory.map((sample) => place(sample, index + 1));
  const lower = memory.map((sample) => place(sample, index)).reverse();
  return shape("polygon", { class: PARTS[index], points: [...upper, ...lower].join(" ") });
}

// Memory against its limits.
function memoryFacts(breakdown) {
  const told = (name) => Number(breakdown[name] ?? 0);
  const used = told("kv_reserved") + told("prompt_cache");
  const budget = told("kv_budget");
  return [
    budget && `running requests and prompt cache take ${bytes(used)} of ${bytes(budget)}`,
    told("kv_wanted") && `requests want ${bytes(told("kv_wanted"))} more`,
    `the most in use so far, without free buffers, was ${bytes(told("mlx_peak"))}`,
  ].filter(Boolean);
}

function showMemory(report, now) {
  memory.push({ at: now, sizes: memoryParts(report.memory.breakdown) });
  while (memory[0].at < now - windowS(now)) memory.shift();
  const sums = memory.map((sample) => sample.sizes.reduce((sum, each) => sum + each, 0));
  const highest = Math.max(...sums, 1);
  const bands = PARTS.map((_, index) => band(index, highest, now));
  const scale = shape("text", { x: 4, y: 14 }, bytes(highest));
  const axis = timeAxis(MEMORY_HEIGHT + 14, now, 0);
  const shapes = [...bands, scale, ...axis];
  part("memory").replaceChildren(drawing(MEMORY_HEIGHT + 18, "memory over time", ...shapes));
  const sizes = memory.at(-1).sizes;
  legend("parts", PARTS, PARTS.map((name, index) => `${PART_WORDS[name]} ${bytes(sizes[index])}`));
  part("memory-facts").textContent = memoryFacts(report.memory.breakdown).join(" · ");
}

// Machine --------------------------------------------------------------------

// A backend's memory, and the used and free parts of its budget.
function claims(backend) {
  const told = ["held_bytes", "reserved_bytes", "cached_bytes"].map((name) => Number(backend[name]));
  return [...told, Math.max(Number(backend.budget_bytes) - told[1] - told[2], 0)];
}

function backendName(backend) {
  return `${backend.model || "loading"} (${backend.is_own ? "this one" : backend.process_id})`;
}

function backendBars(backend, index, pixelsPerByte) {
  const y = index * ROW;
  let x = labels;
  const bars = claims(backend).map((size, which) => {
    const place = { x, width: size * pixelsPerByte, y: y + 3, height: ROW - 6 };
    x += place.width;
    const title = shape("title", {}, `${CLAIM_WORDS[which]} ${bytes(size)}`);
    return shape("rect", { class: CLAIMS[which], ...place }, title);
  });
  const label = shortened(backendName(backend), true);
  return shape("g", {}, shape("text", { x: 0, y: y + ROW - 5 }, label), ...bars);
}

function backendRow(backend) {
  const sizes = [backend.held_bytes, backend.reserved_bytes, backend.cached_bytes, backend.budget_bytes];
  const wanted = Number(backend.wanted_bytes) ? bytes(backend.wanted_bytes) : "";
  return [backendName(backend), ...sizes.map(bytes), wanted, backend.is_busy ? "busy" : "idle"];
}

function showMachine({ machine }) {
  part("machine").hidden = !machine;
  if (!machine) return;
  const { backends } = machine;
  const sizes = backends.map((each) => Number(each.held_bytes) + Number(each.budget_bytes));
  const claimed = sizes.reduce((sum, each) => sum + each, 0);
  const noun = backends.length === 1 ? "backend" : "backends";
  part("machine-facts").textContent =
    `${bytes(claimed)} of ${bytes(machine.usable_bytes)} claimed by ${count(backends.length)} ${noun}`;
  // Weights alone may exceed the memory.
  const scale = (width - labels) / Math.max(Number(machine.usable_bytes), ...sizes, 1);
  const rows = backends.map((backend, index) => backendBars(backend, index, scale));
  part("machine-bars").replaceChildren(drawing(rows.length * ROW, "memory by backend", ...rows));
  const names = ["backend", "weights", "running", "cached", "budget", "wants", "is"];
  part("backends").replaceChildren(table(names, backends.map(backendRow)));
}

// Prompt cache ---------------------------------------------------------------

function arranged(prefixes) {
  const below = new Map();
  for (const prefix of prefixes) {
    below.set(prefix.parent, [...(below.get(prefix.parent) ?? []), prefix]);
  }
  const ranked = (number) =>
    [...(below.get(number) ?? [])].sort((a, b) => a.is_pinned - b.is_pinned || a.worth - b.worth);
  const pending = ranked(0).map((prefix) => [prefix, "", ""]);
  const rows = [];
  while (pending.length) {
    const [prefix, drawn, indent] = pending.pop();
    rows.push([prefix, drawn]);
    const children = ranked(prefix.number);
    const [branch, rest] = children.length > 1 ? ["├ ", "│ "] : ["", ""];
    pending.push(...children.map((child) => [child, indent + branch, indent + rest]));
  }
  return rows;
}

function prefixRow([prefix, drawn]) {
  const places = [
    "memory",
    prefix.is_on_disk && "disk",
    prefix.is_pinned && "pinned",
    prefix.is_in_use && "in use",
    prefix.has_state && "with state",
  ];
  return [
    drawn + prefix.place,
    count(prefix.start),
    count(prefix.tokens),
    bytes(prefix.bytes),
    count(prefix.hits),
    count(prefix.idle_requests),
    Number(prefix.worth).toFixed(1),
    places.filter(Boolean).join(", "),
  ];
}

function reuseBars(spans) {
  const newest = Math.min(...spans.map((span) => span.age_s));
  const bars = spans.map((span) => {
    const height = (30 * Number(span.hit_tokens)) / Math.max(Number(span.looked_up_tokens), 1);
    const age = Math.round((span.age_s - newest) / SPAN_S);
    const facts = `${share(span.hit_tokens, span.looked_up_tokens)} of ${count(span.looked_up_tokens)} tokens`;
    const place = { class: "bar", x: width - 12 * (age + 1), y: 30 - height, width: 10, height };
    return shape("rect", place, shape("title", {}, facts));
  });
  const ground = shape("line", { x1: 0, x2: width, y1: 31, y2: 31 });
  return drawing(32, "reused tokens, five minutes a bar", ...bars, ground);
}

function showCache(reply) {
  const { books } = reply;
  const lost = [
    Number(reply.recomputed_tokens) && `${count(reply.recomputed_tokens)} computed again after they were evicted`,
    Number(reply.stateless_tokens) && `${count(reply.stateless_tokens)} for want of a state`,
  ];
  const facts = [
    `saved ${count(books.hit_tokens)} of ${count(books.looked_up_tokens)} prompt tokens ` +
      `(${share(books.hit_tokens, books.looked_up_tokens)})`,
    `${bytes(books.bytes)} of ${bytes(books.budget_bytes)}`,
    `${count(books.nodes)} nodes, ${count(books.tokens)} tokens, ${count(books.evictions)} evictions`,
    ...lost.filter(Boolean),
  ];
  part("cache-facts").textContent = facts.join(" · ");
  part("reuse").replaceChildren(...(reply.spans.length ? [reuseBars(reply.spans)] : []));
  const names = ["prefix", "from", "tokens", "bytes", "hits", "idle", "worth", "lies in"];
  const rows = arranged(reply.prefixes).map(prefixRow);
  part("cache").replaceChildren(...(rows.length ? [table(names, rows)] : []));
}

async function lookAtCache() {
  try {
    showCache(await ask("prompt-cache"));
  } catch (error) {
    part("cache-facts").textContent = error.message;
    part("reuse").replaceChildren();
    part("cache").replaceChildren();
  }
}

// The rest -------------------------------------------------------------------

function showState(report) {
  const { model } = report;
  part("model").textContent = model ? `${model.name} (${model.type})` : "no model is loaded";
  const turn = report.turn_s >= LONG_TURN_S ? [`in one turn for ${Math.round(report.turn_s)} s`] : [];
  const processes = report.processes.map(
    (each) => `${each.role} ${each.process_id} ${bytes(each.resident_bytes)}`,
  );
  document.title = model ? `${model.name} – mlx-grpc-backend` : "mlx-grpc-backend";
  part("state").textContent = [report.state, ...turn, ...processes].join(" · ");
}

function showErrors(report) {
  const { disk } = report.prompt_cache;
  const lines = [
    report.state === "ERROR" && "the engine is in error",
    Number(report.restarts) && `${count(report.restarts)} engines lost, ${report.lost_s} s in all`,
    ...[...report.latest_restarts].reverse().map((each) => `${each.reason}: ${each.lost_s} s`),
    Number(disk.damaged) && `${count(disk.damaged)} files of the prompt cache damaged`,
    Number(disk.dropped) && `${count(disk.dropped)} nodes not written, too many were waiting`,
  ];
  const shown = lines.filter(Boolean).map((line) => element("p", { class: "bad" }, line));
  part("errors").replaceChildren(...(shown.length ? shown : [element("p", { class: "quiet" }, "none")]));
}

class TokenNeeded extends Error {}

async function ask(path) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const reply = await fetch(path, { headers, cache: "no-store" });
  if (reply.status === 401) throw new TokenNeeded("the token is missing or wrong");
  const told = await reply.json();
  if (!reply.ok) throw new Error(told.error);
  return told;
}

function showProblem(text) {
  part("problem").textContent = text;
  part("problem").hidden = !text;
}

async function look() {
  measure();
  try {
    const report = await ask("inspect");
    const now = performance.now() / 1000;
    showState(report);
    showRequests(report, now);
    showMemory(report, now);
    showMachine(report);
    showErrors(report);
    if (looks % LOOKS_PER_CACHE_LOOK === 0) await lookAtCache();
    looks += 1;
    showProblem("");
    part("door").hidden = true;
    part("view").hidden = false;
  } catch (error) {
    if (error instanceof TokenNeeded) {
      showProblem(token ? error.message : "");
      part("door").hidden = false;
      part("view").hidden = true;
      return;
    }
    showProblem(`the backend does not answer: ${error.message}`);
  }
  setTimeout(look, POLL_MS);
}

part("door").addEventListener("submit", (event) => {
  event.preventDefault();
  token = part("token").value;
  look();
});

legend("phases", PHASES);
legend("claims", CLAIMS, CLAIM_WORDS);
const given = new URLSearchParams(location.hash.slice(1)).get("token");
if (given) {
  token = given;
  history.replaceState(null, "", location.pathname);
}
look();
