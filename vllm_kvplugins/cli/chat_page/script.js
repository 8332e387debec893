"use strict";
// Facts of a turn come from three places, and each says from which:
//   the response  the server's usage and the policy's report, for this request alone
//   this page     times, which include the way here
//   Δ             growth of the server's counters during the turn, over all clients

const byId = id => document.getElementById(id);
const POLL_MS = 3000, SETTLE_MS = 250;
const POLICY = "vllm:kv_policy_";

// Messages as they are sent; each answer also has its turn.
let messages = [];
let running = null; // AbortController of the answer that is being streamed
let latest = null; // newest metrics, or null while the server does not respond
let turns = [];

// -- small helpers --------------------------------------------------------------------

function element(name, className = "", ...content) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...content);
  return made;
}

const number = value => Math.round(value).toLocaleString("en");

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit++; }
  return (unit && value < 100 ? value.toFixed(1) : Math.round(value)) + " " + units[unit];
}

const plural = (count, word) => number(count) + " " + word + (count === 1 ? "" : "s");

async function errorOf(response) {
  try {
    const error = (await response.json()).error;
    return error.message || JSON.stringify(error);
  } catch {
    return "HTTP " + response.status + " " + response.statusText;
  }
}

async function read(path) {
  const response = await fetch(path);
  if (!response.ok) throw new Error(await errorOf(response));
  return response.json();
}

function showError(text) {
  byId("error").textContent = text;
  byId("error").hidden = !text;
}

function announce(text) { byId("said").textContent = text; }

// -- the server -----------------------------------------------------------------------

function setState(good, text) {
  byId("light").className = good ? "good" : "bad";
  byId("state").textContent = text;
}

async function connect() {
  const found = await read("/api/server");
  const select = byId("model"), before = select.value;
  select.replaceChildren(...found.models.map(name => new Option(name)));
  if (found.models.includes(before)) select.value = before;
  byId("reset").hidden = !found.can_reset;
  byId("state").dataset.server = found.server;
}

async function poll() {
  try {
    const metrics = await read("/api/metrics");
    if (latest === null) await connect();
    latest = metrics;
    const policy = (turns.findLast(turn => turn.report) || {}).report?.policy;
    const has = Object.keys(latest.values).some(name => name.startsWith(POLICY));
    setState(true, byId("model").value + " at " + byId("state").dataset.server + ", "
      + (has ? "policy " + (policy || "on") : "no KV policy"));
  } catch (error) {
    latest = null;
    setState(false, error.message);
  }
  drawGauges();
}

const GAUGES = [
  ["vllm:num_requests_running", "requests running", number],
  ["vllm:num_requests_waiting", "requests waiting", number],
  ["vllm:kv_cache_usage_perc", "pool in use", value => (100 * value).toFixed(1) + " %"],
  [POLICY + "resident_tokens", "tokens resident", number],
  [POLICY + "sessions", "sessions", number],
  [POLICY + "session_bytes", "sessions, host memory", bytes],
  [POLICY + "session_disk_bytes", "sessions, disk", bytes],
  [POLICY + "host_bytes", "host memory, all", bytes],
  [POLICY + "device_table_bytes", "device memory outside the pool", bytes],
];

function drawGauges() {
  const rows = GAUGES.map(([name, label, show]) => {
    const value = latest?.values[name];
    const shown = value === undefined ? "–" : show(value);
    return element("div", "", element("dt", "", label), element("dd", "", shown));
  });
  byId("gauges").replaceChildren(...rows);
}

// -- facts of a turn ------------------------------------------------------------------

function growth(turn, name) {
  const before = turn.before?.values, after = turn.after?.values;
  if (!before || after?.[name] === undefined) return undefined;
  return after[name] - (before[name] ?? 0);
}

// One fact: the value for this request, or the growth of a counter, or a dash.
function fact(label, help, exact, counter, show = number) {
  if (exact !== undefined && exact !== null) return { label, help, text: exact };
  if (counter !== undefined)
    return { label, text: show(counter), delta: true,
      help: help + " The server did not report it for this request: this is the growth "
        + "of a counter during the turn, and other clients count, too." };
  return { label, text: "–", none: true, help: help + " Not reported" + whyNot() };
}

function whyNot() {
  if (latest === null) return ": the server does not respond.";
  const has = Object.keys(latest.values).some(name => name.startsWith(POLICY));
  return has ? " for this answer: a stopped or failed request has no report."
    : ": this server runs without a KV policy.";
}

function facts(turn) {
  const { usage, report } = turn, prompt = usage?.prompt_tokens;
  const details = usage?.prompt_tokens_details?.cached_tokens;
  const reused = report
    ? report.cached_tokens + report.loaded_tokens + report.session_tokens : details;
  const size = report?.block_size;
  const tokens = count => plural(count, "token");
  return [
    fact("prompt", "Tokens of the whole conversation with the chat template. The second "
      + "number had to be computed for this turn.",
      prompt === undefined ? null : tokens(prompt)
        + (reused === undefined ? "" : ", " + number(prompt - reused) + " computed"),
      growth(turn, "vllm:prompt_tokens_total"), tokens),
    fact("from a session", "Prompt tokens that continued the compressed cache of an earlier "
      + "turn.", report && tokens(report.session_tokens) + (report.session_tokens
        ? report.session_on_device ? ", still on the device" : ", copied back" : ""),
      growth(turn, POLICY + "session_restored_tokens_total"), tokens),
    fact("from the prefix cache", "Prompt tokens whose exact blocks were still in vLLM's "
      + "pool.", report && tokens(report.cached_tokens),
      growth(turn, "vllm:prefix_cache_hits_total"), tokens),
    fact("finished turns", "Turns before this one that the server found in the prompt, and "
      + "their tokens; with the system prompt where that stands alone.",
      report && (report.turn_ends === null ? "not used" : report.turn_ends.length
        ? number(report.turn_ends.length) + ", " + tokens(report.turn_ends.at(-1)) : "none")),
    fact("on the device", "Blocks of " + (size ?? latest?.block_size ?? "?") + " tokens that the "
      + "request held at its end, in the layers that the policy manages.",
      report && plural(report.held_blocks, "block") + " of " + number(report.stock_blocks)
        + share(report)),
    fact("compressions", "Compactions of this request.",
      report && number(report.compressions), growth(turn, POLICY + "compressions_total")),
    fact("host memory", "Bytes that the request reserved on the host for tokens that left "
      + "the device.", report && bytes(report.host_bytes)),
    fact("session left", "Host memory of the session that the next turn can continue.",
      report && (report.session_bytes ? bytes(report.session_bytes) : "none")),
    fact("episode", "Which episode of the conversation answered (EpiCache), numbered from 0 "
      + "as in the log.", report && (report.episode === null ? "none"
        : report.episode + ", of " + report.episodes)),
    fact("first token", "Measured by this page, from the message to the first text.",
      turn.firstMs && number(turn.firstMs) + " ms"),
    fact("answer", "Tokens of the answer; the speed is measured by this page, after the "
      + "first token.", usage && tokens(usage.completion_tokens) + speed(turn)),
  ];
}

function share(report) {
  if (!report.stock_blocks) return "";
  return " (" + Math.round(100 * report.held_blocks / report.stock_blocks) + " %)";
}

function speed(turn) {
  const count = turn.usage.completion_tokens - 1, seconds = (turn.lastMs - turn.firstMs) / 1000;
  return count > 0 && seconds > 0 ? ", " + (count / seconds).toFixed(1) + " per s" : "";
}

// Moves a tip, which begins at the left of its box, into the page.
function keepInside(tip, boxLeft) {
  const room = document.documentElement.clientWidth - 8 - tip.offsetWidth;
  tip.style.left = Math.max(Math.min(boxLeft, room), 8) - boxLeft + "px";
}

function drawFacts(turn) {
  const list = element("dl", "facts");
  for (const each of facts(turn)) {
    const value = element("dd", "", each.text);
    if (each.delta) value.append(element("span", "delta", "Δ all clients"));
    const tip = element("span", "tip", each.help);
    tip.setAttribute("role", "tooltip");
    const box = element("div", "fact" + (each.none ? " none" : ""),
      element("dt", "", each.label), value, tip);
    box.tabIndex = 0;
    const place = () => keepInside(tip, box.getBoundingClientRect().left);
    box.addEventListener("pointerenter", place);
    box.addEventListener("focus", place);
    list.append(box);
  }
  turn.node.querySelector(".facts")?.remove();
  turn.node.querySelector(".counters")?.remove();
  turn.node.append(list, ...counters(turn));
}

// The counters that grew during a turn, as they are.
function counters(turn) {
  const names = Object.keys(turn.after?.values ?? {})
    .filter(name => name.endsWith("_total") && growth(turn, name) > 0)
    .filter(name => name.startsWith(POLICY) || /cache_hits|preemptions/.test(name))
    .sort();
  const others = growth(turn, "vllm:request_success_total") - 1;
  if (!names.length && !(others > 0)) return [];
  const table = element("table", "", ...names.map(name => element("tr", "",
    element("td", "", name), element("td", "", "+" + number(growth(turn, name))))));
  const note = others > 0
    ? " The server ended " + plural(others, "other request") + " in this time."
    : "";
  return [element("details", "counters",
    element("summary", "", "Counters during this turn, over all clients"),
    element("p", "note", "Growth between the message and the end of its answer." + note),
    table)];
}

function drawChart() {
  const shown = turns.filter(turn => turn.report);
  const most = Math.max(1, ...shown.map(turn => turn.report.stock_blocks));
  byId("no-chart").hidden = shown.length > 0;
  byId("chart").replaceChildren(...shown.map(turn => {
    const { held_blocks: held, stock_blocks: stock, block_size: size } = turn.report;
    const track = (kind, blocks) => {
      const bar = element("span", "bar " + kind);
      bar.style.width = "calc((100% - 4rem) * " + blocks / most + ")";
      return element("div", "track", bar, number(blocks * size));
    };
    return element("li", "", element("span", "turn", String(turn.number)),
      track("held", held), track("stock", stock));
  }));
}

// -- the conversation -----------------------------------------------------------------

function addMessage(role, text) {
  const bubble = element("div", "bubble", text);
  const label = element("span", "unseen", role === "user" ? "You: " : "Answer: ");
  const node = element("li", "message " + role, label, bubble);
  byId("messages").append(node);
  return node;
}

// The end of the conversation; on phones, the page goes on below it.
function isAtEnd() {
  const last = byId("messages").lastElementChild;
  return !last || last.getBoundingClientRect().bottom < innerHeight;
}

function toEnd() { byId("messages").lastElementChild?.scrollIntoView({ block: "end" }); }

function setRunning(controller) {
  running = controller;
  byId("send").hidden = Boolean(running);
  byId("stop").hidden = !running;
  const last = messages.at(-1);
  byId("again").disabled = Boolean(running) || last?.role !== "assistant";
  byId("save").disabled = !messages.length;
  byId("new").disabled = byId("reset").disabled = Boolean(running);
  byId("empty").hidden = messages.length > 0;
}

function requestBody() {
  const system = byId("system").value.trim();
  const history = messages.map(({ role, content }) => ({ role, content }));
  const body = {
    model: byId("model").value,
    messages: system ? [{ role: "system", content: system }, ...history] : history,
  };
  const optional = { max_tokens: "max-tokens", temperature: "temperature" };
  for (const [name, id] of Object.entries(optional))
    if (byId(id).value !== "") body[name] = Number(byId(id).value);
  if (byId("salt").value) body.cache_salt = byId("salt").value;
  if (!byId("sessions").checked) body.vllm_xargs = { kv_session: 0 };
  return body;
}

// The objects of a stream of server-sent events.
async function* events(response) {
  const reader = response.body.getReader(), decoder = new TextDecoder();
  for (let rest = "";;) {
    const { done, value } = await reader.read();
    rest += done ? "\n\n" : decoder.decode(value, { stream: true });
    const parts = rest.split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: ?/, "").trim();
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
    if (done) return;
  }
}

function takeEvent(turn, event) {
  if (event.error) throw new Error(event.error.message || JSON.stringify(event.error));
  if (event.usage) turn.usage = event.usage;
  const report = event.kv_transfer_params?.kv_policy;
  if (report) turn.report = report;
  const delta = event.choices?.[0]?.delta ?? {};
  const thought = delta.reasoning ?? delta.reasoning_content ?? "";
  const text = delta.content ?? "";
  if (!thought && !text) return;
  turn.lastMs = performance.now() - turn.startMs;
  turn.firstMs ??= turn.lastMs;
  const follow = isAtEnd(), bubble = turn.node.querySelector(".bubble");
  if (thought) {
    turn.thinking ??= bubble.insertBefore(element("div", "thinking"), bubble.firstChild);
    turn.thinking.append(thought);
  }
  turn.text += text;
  bubble.append(text);
  if (follow) toEnd();
}

// Streams the answer to the messages. Returns why it failed; "" if it did not.
async function stream(turn, signal) {
  try {
    turn.startMs = performance.now();
    const response = await fetch("/api/chat", {
      method: "POST", signal, body: JSON.stringify(requestBody()),
      headers: { "Content-Type": "application/json" },
    });
    if (!response.ok) throw new Error(await errorOf(response));
    for await (const event of events(response)) takeEvent(turn, event);
    return "";
  } catch (error) {
    if (signal.aborted) turn.stopped = true;
    else return error.message || String(error);
    return "";
  }
}

async function answer() {
  showError("");
  const turn = { number: turns.length + 1, text: "", node: addMessage("assistant", "") };
  turn.node.classList.add("waiting");
  const controller = new AbortController();
  setRunning(controller);
  toEnd();
  turn.before = await read("/api/metrics").catch(() => null);
  const failure = await stream(turn, controller.signal);
  turn.node.classList.remove("waiting");
  if ((failure || turn.stopped) && !turn.text) {
    turn.node.remove();
    takeBack();
  } else {
    messages.push({ role: "assistant", content: turn.text });
    turns.push(turn);
    const mark = failure ? "The answer broke off." : turn.stopped ? "Stopped." : "";
    if (mark) turn.node.append(element("p", "mark", mark));
    // The engine reports its last step a moment later.
    await new Promise(resolve => setTimeout(resolve, SETTLE_MS));
    await poll();
    turn.after = latest;
    const follow = isAtEnd();
    drawFacts(turn);
    drawChart();
    if (follow) toEnd();
    announce(mark || "Answer finished, " + plural(turn.usage?.completion_tokens ?? 0, "token"));
  }
  setRunning(null);
  showError(failure);
}

// A message that was not answered goes back into the field.
function takeBack() {
  const message = messages.pop();
  byId("messages").lastElementChild.remove();
  if (!byId("text").value) byId("text").value = message.content;
}

function send() {
  const text = byId("text").value.trim();
  if (!text || running) return;
  byId("text").value = "";
  messages.push({ role: "user", content: text });
  addMessage("user", text);
  answer();
}

function again() {
  if (running || messages.at(-1)?.role !== "assistant") return;
  messages.pop();
  turns.pop().node.remove();
  drawChart();
  answer();
}

function startNew() {
  messages = [];
  turns = [];
  byId("messages").replaceChildren();
  drawChart();
  showError("");
  setRunning(null);
  byId("text").focus();
}

// The file that `kvplugins explain --chat` reads.
function save() {
  const text = JSON.stringify(requestBody().messages, null, 1) + "\n";
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = "chat.json";
  link.click();
  URL.revokeObjectURL(link.href);
}

async function dropSessions() {
  if (!confirm("Drop the sessions and the prefix cache of all clients of this server?")) return;
  const response = await fetch("/api/reset", {
    method: "POST", body: "{}", headers: { "Content-Type": "application/json" },
  });
  const done = response.ok && (await response.clone().json()).success !== false;
  showError(done ? "" : response.ok ? "The server is busy; try again." : await errorOf(response));
  if (done) announce("All sessions were dropped.");
  poll();
}

byId("composer").addEventListener("submit", event => { event.preventDefault(); send(); });
byId("text").addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
addEventListener("keydown", event => {
  if (event.key === "Escape" && running) running.abort();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("again").addEventListener("click", again);
byId("new").addEventListener("click", startNew);
byId("save").addEventListener("click", save);
byId("reset").addEventListener("click", dropSessions);
setInterval(() => { if (!document.hidden) poll(); }, POLL_MS);
poll();
byId("text").focus();
