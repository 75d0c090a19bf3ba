"use strict";
const LOOK_MS = 3000, OLD_MS = 10000, PATIENCE_MS = 12000;
const $ = (id) => document.getElementById(id);
const make = (tag, props = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children);
  return node;
};
const put = (node, text) => { if (node.textContent !== text) node.textContent = text; };
const load = () => { try { return JSON.parse(localStorage.getItem("lilliput.settings")) ?? {}; } catch { return {}; } };
let facts = null, seenAt = 0, trouble = "", chosen = "", sorting = { by: "blocks", up: true }, timer = 0;
const events = [];

// ---- in words

const label = (server) => server.name || server.peer_id.slice(-8);
const span = ([start, end]) => `${start}:${end}`;
const which = (spans) => (spans.length === 1 && spans[0][1] - spans[0][0] === 1 ? "block " : "blocks ") + few(spans);
const and = (texts) => texts.length < 2 ? texts.join("") : texts.slice(0, -1).join(", ") + " and " + texts.at(-1);
const short = (n) => n >= 1e6 ? (n / 1e6).toFixed(1) + "M" : n >= 1e4 ? Math.round(n / 1e3) + "k" : n >= 1e3 ? (n / 1e3).toFixed(1) + "k" : String(n);
const rate = (n) => n == null ? "?" : n < 10 ? n.toFixed(1) : short(Math.round(n));
const ms = (n) => n == null ? "?" : (n < 10 ? n.toFixed(1) : Math.round(n)) + " ms";
const plural = (n, one, many = one + "s") => `${n} ${n === 1 ? one : many}`;
function ago(epoch) {
  if (!epoch) return "?";
  const seconds = Math.max(0, Date.now() / 1000 - epoch);
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) if (seconds >= size) return `${Math.floor(seconds / size)} ${unit}`;
  return `${Math.floor(seconds)} s`;
}
function standing(server) {  // its colour, a word, a sentence
  if (server.other_files) return ["lost", "other files", "Holds other files under the model's name; this API does not use it."];
  if (server.failed) return ["lost", "failed", "Failed an answer a moment ago; this API passes it over for a while."];
  if (server.state === "joining") return ["joining", "joining", "Reads its blocks and will serve them soon."];
  if (server.state === "draining") return ["draining", server.moving_to ? `moves to ${span(server.moving_to)}` : "leaving", "Takes no new conversations; those that it has move to others."];
  if (server.silent) return ["lost", "no answer", "Announces itself, but did not answer this API's last ping."];
  return ["serving", "serving", "Takes conversations."];
}

// ---- what is seen

function draw() {
  for (const id of ["tiles", "blocks", "table", "lately", "words"]) $(id).hidden = false;
  document.title = facts.missing.length ? `▲ ${and(facts.missing.map(span))} missing: the swarm` : "Lilliput: the swarm";
  put($("model"), `${facts.model}, ${plural(facts.blocks, "block")}`);
  drawVerdict(); drawTiles(); drawMap(); drawPath(); drawTable(); drawLinks(); drawDetails(); drawEvents();
}
function runs(test) {  // spans of blocks whose number of servers passes a test
  const found = [];
  facts.coverage.forEach((count, block) => {
    if (!test(count)) return;
    if (found.length && found.at(-1)[1] === block) found.at(-1)[1]++; else found.push([block, block + 1]);
  });
  return found;
}
function few(spans) {
  const texts = spans.map(([start, end]) => end - start === 1 ? String(start) : span([start, end]));
  return texts.length > 6 ? and([...texts.slice(0, 5), `${texts.length - 5} more runs`]) : and(texts);
}
function drawVerdict() {
  const missing = facts.missing, single = runs((count) => count === 1), bad = missing.length > 0;
  $("verdict").classList.toggle("bad", bad);
  put($("headline"), !facts.servers.length ? "No server of this model is in the swarm" : bad ? `Nobody serves ${which(missing)}` : `All ${facts.blocks} blocks are served`);
  const whole = single.length === 1 && single[0][1] - single[0][0] === facts.blocks;
  const meaning = bad ? ["No answer gets past there: it waits half a minute, then fails. To help, start a server with ", make("code", { textContent: `--blocks ${span(missing[0])}` }), ", or one without, which chooses where it helps most."]
    : whole ? ["Each by one server only: when one leaves, answers wait until another takes its place."]
    : single.length ? [`${which(single).replace("b", "B")} ${which(single).startsWith("block ") ? "has one server only" : "have one server each"}: when it leaves, answers wait until another takes its place.`]
    : ["Each by more than one server: any of them may leave, and answers go on."];
  if ($("meaning").dataset.said !== String(meaning.map((part) => part.textContent ?? part))) {
    $("meaning").dataset.said = String(meaning.map((part) => part.textContent ?? part));
    $("meaning").replaceChildren(...meaning);
  }
}
function drawTiles() {
  const { servers, coverage, path, requests } = facts, count = (word) => servers.filter((server) => server.state === word).length;
  const serving = servers.filter((server) => server.serves), least = coverage.length ? Math.min(...coverage) : 0;
  let free = Infinity, all = 0;  // of the block with the least room
  coverage.forEach((_, block) => {
    const holders = serving.filter((server) => server.start <= block && block < server.end);
    const sum = holders.reduce((n, server) => n + server.cache_tokens_free, 0);
    if (sum < free) [free, all] = [sum, holders.reduce((n, server) => n + server.cache_tokens, 0)];
  });
  if (free === Infinity) free = 0;
  const lost = servers.filter((server) => standing(server)[0] === "lost").length;
  const changing = [count("joining") && `${count("joining")} joining`, count("draining") && `${count("draining")} leaving`, lost && `${lost} out of use`].filter(Boolean);
  const sum = (name) => servers.reduce((n, server) => n + server[name], 0);
  const tiles = [
    ["Servers", String(serving.length), ["serving", ...changing].join(", ")],
    ["Fewest servers of a block", String(least), `the most: ${Math.max(0, ...coverage)}`],
    ["Speed of one answer", path ? rate(1000 / path.total_ms) : "none", path ? `tokens/s expected, over ${plural(path.legs.length, "server")}` : facts.missing.length ? "blocks are missing" : "no path may be taken"],
    ["Room for conversations", short(free), all ? `tokens, of ${short(all)}, at the fullest block` : "tokens"],
    ["Answers right now", String(requests.running), requests.waiting ? `by this API; ${requests.waiting} wait` : "by this API; none waits"],
    ["Sessions on servers", String(sum("sessions")), sum("queue_length") ? `${sum("queue_length")} wait for room` : "none waits for room"],
  ];
  if (!$("tiles").children.length) $("tiles").append(...tiles.map(([name]) => make("div", {}, make("dt", { textContent: name }), make("dd", {}, make("b"), make("span")))));
  tiles.forEach(([, big, small], n) => {
    const [value, note] = $("tiles").children[n].lastElementChild.children;
    put(value, big); put(note, small);
    value.classList.toggle("bad-number", big === "none" || (big === "0" && n < 2));
  });
}
function lanesOf(servers) {  // servers that do not overlap share a lane
  const ends = [], lanes = new Map();
  for (const server of [...servers].sort((a, b) => a.start - b.start || b.end - a.end)) {
    let lane = ends.findIndex((end) => end <= server.start);
    if (lane < 0) lane = ends.length;
    ends[lane] = server.end;
    lanes.set(server.peer_id, lane);
  }
  return [lanes, ends.length];
}
function drawMap() {
  const { blocks, coverage, servers, missing } = facts, most = Math.max(3, ...coverage);
  for (const id of ["axis", "cover", "lanes"]) $(id).style.setProperty("--blocks", blocks);
  const wide = $("lanes").clientWidth / blocks, step = [1, 2, 5, 10, 20, 50, 100].find((n) => n * wide >= 34) || Math.ceil(blocks / 8);
  $("axis").replaceChildren(...coverage.flatMap((_, block) => block % step || (block && (blocks - block) * wide < 24) ? [] : [make("span", { textContent: block, style: `grid-column:${block + 1}` })]));
  $("cover").replaceChildren(...coverage.map((count, block) => make("i", { className: count > 1 ? "" : count ? "one" : "none", textContent: wide >= 15 ? count : "", title: `block ${block}: ${count ? plural(count, "server") : "nobody"}`,
    style: count ? `height:${Math.max(wide < 15 ? 12 : 34, 100 * count / most)}%` : "" })));
  $("cover").ariaLabel = "Servers of each block: " + and([...new Set(coverage)].sort((a, b) => a - b).map((count) => `${few(runs((n) => n === count))}: ${count || "nobody"}`));
  const [lanes, depth] = lanesOf(servers), box = $("lanes"), on = new Map((facts.path?.legs ?? []).map((leg) => [leg.peer_id, leg]));
  box.style.setProperty("--lane", depth <= 8 ? "2.1rem" : depth <= 18 ? "1.45rem" : "10px");
  box.classList.toggle("dense", depth > 18);
  for (const node of box.querySelectorAll(".hole")) node.remove();
  const had = new Map([...box.children].map((node) => [node.dataset.peer, node]));
  servers.forEach((server, n) => {
    const [colour, word] = standing(server), leg = on.get(server.peer_id), size = server.end - server.start;
    const bar = had.get(server.peer_id) ?? make("button", { type: "button", onclick: () => choose(server.peer_id) }, make("span", {}, make("b"), make("small")));
    had.delete(server.peer_id);
    bar.dataset.peer = server.peer_id;
    bar.className = "bar " + colour;
    bar.style.cssText = `grid-column:${Math.min(server.start, blocks - 1) + 1}/${Math.min(server.end, blocks) + 1};grid-row:${lanes.get(server.peer_id) + 1}` + (leg ? `;--from:${100 * (leg.start - server.start) / size}%;--share:${100 * (leg.end - leg.start) / size}%` : "");
    const [name, more] = bar.firstElementChild.children;
    put(name, label(server)); put(more, colour === "serving" ? `${rate(server.tokens_per_second)}/s` : word);
    bar.ariaPressed = String(server.peer_id === chosen);
    bar.ariaLabel = `${label(server)}, blocks ${span([server.start, server.end])}, ${word}, ${rate(server.tokens_per_second)} tokens a second` + (leg ? ", on the path of a new answer" : "");
    bar.title = `${label(server)}: blocks ${span([server.start, server.end])}, ${word}`;
    if (box.children[n] !== bar) box.insertBefore(bar, box.children[n] ?? null);
  });
  for (const node of had.values()) node.remove();
  box.append(...missing.map(([start, end]) => make("div", { className: "hole", ariaHidden: "true", style: `grid-column:${start + 1}/${end + 1}`, textContent: (end - start) * wide >= 60 ? `nobody: ${few([[start, end]])}` : "" })));
  const bars = [...box.querySelectorAll(".bar")], entry = bars.find((bar) => bar === document.activeElement) ?? bars.find((bar) => bar.dataset.peer === chosen) ?? bars[0];
  for (const bar of bars) bar.tabIndex = bar === entry ? 0 : -1;
}
function drawPath() {
  const { path, servers } = facts, names = new Map(servers.map((server) => [server.peer_id, label(server)]));
  $("path").hidden = !path;
  if (!path) return;
  const network = path.legs.reduce((n, leg) => n + leg.network_ms, path.back_ms), compute = path.total_ms - network;
  put($("path-sum"), `About ${ms(path.total_ms)} for each token of an answer: ${ms(compute)} computing, ${ms(network)} on the way.`);
  const way = (n) => make("li", { className: "hop", textContent: `${ms(n)} →` });
  $("legs").replaceChildren(make("li", { textContent: "this API" }), ...path.legs.flatMap((leg) => [way(leg.network_ms),
    make("li", {}, make("b", { textContent: names.get(leg.peer_id) ?? leg.peer_id.slice(-8) }), make("small", { textContent: ` ${span([leg.start, leg.end])} ${ms(leg.compute_ms)}` }))]),
  ...(path.back_ms ? [way(path.back_ms), make("li", { textContent: "this API" })] : []));
  const part = (n, kind, title) => make("i", { className: kind, title, style: `flex:${Math.max(n, 1e-3)} 0 0` });
  $("time").replaceChildren(...path.legs.flatMap((leg) => [part(leg.network_ms, "way", `on the way: ${ms(leg.network_ms)}`), part(leg.compute_ms, "", `${names.get(leg.peer_id)}: ${ms(leg.compute_ms)}`)]), part(path.back_ms, "way", `back: ${ms(path.back_ms)}`));
}
const COLUMNS = [  // heading, explanation, what is sorted by, text, a second text
  ["server", "The name its owner gave it, or the end of its key", (s) => label(s).toLowerCase(), label, (s) => s.name ? ` ${s.peer_id.slice(-8)}` : ""],
  ["blocks", "10:20 are blocks 10 to 19", (s) => s.start * 1e6 + s.end, (s) => span([s.start, s.end])],
  ["state", "serving, joining (reads its blocks), leaving, or out of use", (s) => standing(s)[1], (s) => standing(s)[1]],
  ["tokens/s", "Of one conversation through all its blocks; behind it, of many at once", (s) => s.tokens_per_second ?? -1, (s) => rate(s.tokens_per_second), (s) => s.throughput ? ` / ${rate(s.throughput)}` : ""],
  ["free cache", "Tokens of conversations that still fit", (s) => s.cache_tokens_free, (s) => short(s.cache_tokens_free), (s) => ` of ${short(s.cache_tokens)}`],
  ["sessions", "Conversations that it takes part in", (s) => s.sessions, (s) => String(s.sessions)],
  ["waiting", "Conversations that wait for room on it", (s) => s.queue_length, (s) => String(s.queue_length)],
  ["precision", "How the weights are kept", (s) => s.dtype, (s) => s.dtype || "?"],
  ["version", "Of Lilliput", (s) => s.version, (s) => s.version || "?"],
  ["since", "How long it has been there", (s) => -s.started_at, (s) => ago(s.started_at)],
  ["round trip", "From this API to it and back", (s) => s.round_trip_ms ?? 1e9, (s) => s.silent ? "no answer" : ms(s.round_trip_ms)],
];
const rows = new Map();
function drawTable() {
  const head = document.querySelector("#servers thead tr"), body = document.querySelector("#servers tbody");
  if (!head.children.length) head.append(...COLUMNS.map(([name, title], n) => make("th", { scope: "col", className: n < 3 || name === "precision" ? "left" : "" }, make("button", { type: "button", textContent: name, title, onclick: () => { sorting = { by: name, up: sorting.by === name ? !sorting.up : true }; drawTable(); } }))));
  [...head.children].forEach((cell, n) => COLUMNS[n][0] === sorting.by ? cell.setAttribute("aria-sort", sorting.up ? "ascending" : "descending") : cell.removeAttribute("aria-sort"));
  $("find").hidden = facts.servers.length < 13;
  const by = COLUMNS.find(([name]) => name === sorting.by)[2], wanted = $("find").value.trim().toLowerCase();
  const fits = (s) => !wanted || (/^\d+$/.test(wanted) && s.start <= +wanted && +wanted < s.end) || `${label(s)} ${s.peer_id} ${span([s.start, s.end])} ${standing(s)[1]} ${s.dtype} ${s.version}`.toLowerCase().includes(wanted);
  const shown = facts.servers.filter(fits).sort((a, b) => (by(a) < by(b) ? -1 : by(a) > by(b) ? 1 : 0) * (sorting.up ? 1 : -1));
  put($("table-sum"), facts.servers.length ? (wanted ? `${shown.length} of ${plural(facts.servers.length, "server")}.` : "Each with what it says of itself, and how far it is from here.") : "None has announced itself.");
  for (const [peer, row] of rows) if (!shown.some((server) => server.peer_id === peer)) { row.remove(); rows.delete(peer); }
  shown.forEach((server, n) => {
    let row = rows.get(server.peer_id);
    if (!row) {
      row = make("tr", { role: "row" }, ...COLUMNS.map(([name], n) => n ? make("td", { role: "cell", className: n < 3 || name === "precision" ? "left" : "" }, make("span"), make("small")) : make("th", { role: "rowheader", scope: "row" }, make("button", { type: "button", onclick: () => choose(server.peer_id, true) }), make("small"))));
      [...row.children].forEach((cell, n) => { cell.dataset.name = COLUMNS[n][0]; });
      row.children[4].append(make("i", { className: "meter" }));
      rows.set(server.peer_id, row);
    }
    COLUMNS.forEach(([, , , text, more], n) => { put(row.children[n].firstElementChild, text(server)); if (more) put(row.children[n].children[1], more(server)); });
    row.children[2].firstElementChild.className = "badge " + standing(server)[0];
    row.children[4].lastElementChild.style.setProperty("--free", `${server.cache_tokens ? 100 * server.cache_tokens_free / server.cache_tokens : 0}%`);
    row.classList.toggle("chosen", server.peer_id === chosen);
    if (body.children[n] !== row) body.insertBefore(row, body.children[n] ?? null);
  });
}
function linksOf() {
  const here = new Map(facts.servers.map((server) => [server.peer_id, server]));
  const own = facts.servers.filter((server) => server.round_trip_ms != null).map((server) => ["this API", label(server), server.round_trip_ms]);
  return [...own, ...facts.servers.flatMap((server) => server.followers.filter(([peer]) => here.has(peer)).map(([peer, took]) => [label(server), label(here.get(peer)), took]))];
}
function drawLinks() {
  const all = linksOf().sort((a, b) => b[2] - a[2]), shown = all.slice(0, 100), most = all.length ? all[0][2] : 0;
  $("links").hidden = !all.length;
  if (!all.length) return;
  if (!$("links").dataset.seen) { $("links").dataset.seen = "1"; $("links").open = all.length <= 24; }
  put($("links-sum"), `${all.length} measured, ${ms(all.at(-1)[2])} to ${ms(most)}` + (all.length > shown.length ? "; the 100 longest" : ""));
  if ($("links").open) document.querySelector("#links tbody").replaceChildren(...shown.map(([from, to, took]) => make("tr", {}, make("td", { className: "left", textContent: from }), make("td", { className: "left", textContent: to }), make("td", { textContent: ms(took) }, make("i", { className: "meter", style: `--free:${100 * took / (most || 1)}%` })))));
}
function drawDetails() {
  const server = facts.servers.find((server) => server.peer_id === chosen), box = $("details");
  if (!server) { box.hidden = true; return; }
  const names = new Map(facts.servers.map((other) => [other.peer_id, other]));
  const onward = server.followers.filter(([peer]) => names.has(peer)).map(([peer, took]) => `${label(names.get(peer))} ${ms(took)}`);
  const entries = [
    ["State", standing(server)[2]], ["Blocks", `${span([server.start, server.end])}, ${plural(server.end - server.start, "block")}`],
    ["One conversation", `${rate(server.tokens_per_second)} tokens/s through its blocks`], ["Many at once", server.throughput ? `${rate(server.throughput)} tokens/s` : "not measured"],
    ["Reading a prompt", server.prefill_tokens_per_second ? `${rate(server.prefill_tokens_per_second)} tokens/s` : "not measured yet"],
    ["Free cache", `${short(server.cache_tokens_free)} of ${short(server.cache_tokens)} tokens`], ["Longest conversation", server.max_length ? `${short(server.max_length)} tokens` : "?"],
    ["Sessions", `${server.sessions}, and ${server.queue_length} waiting`], ["Precision", server.dtype || "?"], ["Adapters", server.adapters.join(", ") || "none"], ["Version", server.version || "?"],
    ["There since", server.started_at ? `${new Date(server.started_at * 1000).toLocaleString()} (${ago(server.started_at)})` : "?"],
    ["From this API and back", server.silent ? "no answer" : server.round_trip_ms == null ? "not measured yet" : ms(server.round_trip_ms)],
    ["On to the next and back", onward.slice(0, 8).join(", ") || (server.end === facts.blocks ? "it holds the last block" : "not measured yet")], ["Key", server.peer_id],
  ];
  if (box.dataset.peer !== chosen || !box.children.length) {
    box.dataset.peer = chosen;
    box.replaceChildren(make("h3", {}, make("span", { textContent: label(server) }), make("button", { type: "button", ariaLabel: "Close", textContent: "✕", onclick: () => choose("") })), make("dl", {}, ...entries.map(([name]) => make("div", {}, make("dt", { textContent: name }), make("dd")))));
  }
  entries.forEach(([, text], n) => put(box.lastElementChild.children[n].lastElementChild, text));
  box.hidden = false;
}
function drawEvents() {
  const shown = events.slice(-12).reverse();
  $("events").replaceChildren(...(shown.length ? shown.map(({ at, text, bad }) => make("li", { className: bad ? "bad" : "" }, make("time", { textContent: at.toLocaleTimeString() }), text)) : [make("li", { className: "caption", textContent: "Nothing has changed since this page was opened." })]));
}

// ---- what happens

function compare(before, after) {
  const old = new Map(before.servers.map((server) => [server.peer_id, server])), tell = (text, bad = false) => events.push({ at: new Date(), text, bad });
  for (const server of after.servers) {
    const was = old.get(server.peer_id), where = `blocks ${span([server.start, server.end])}`;
    old.delete(server.peer_id);
    if (!was) tell(`${label(server)} came: ${where}, ${standing(server)[1]}`);
    else if (was.start !== server.start || was.end !== server.end) tell(`${label(server)} moved from ${span([was.start, was.end])} to ${where}`);
    else if (standing(was)[1] !== standing(server)[1]) tell(`${label(server)} (${where}): ${standing(server)[1]}`, standing(server)[0] === "lost");
  }
  for (const server of old.values()) tell(`${label(server)} went: it held blocks ${span([server.start, server.end])}`);
  if (String(before.missing) !== String(after.missing)) tell(after.missing.length ? `nobody serves ${which(after.missing)}` : "all blocks are served again", after.missing.length > 0);
  if (before.started_at !== after.started_at) tell("this API was started again");
  events.splice(0, Math.max(0, events.length - 100));
}
function choose(peer, scroll = false) {
  const had = chosen;
  chosen = peer === chosen && !scroll ? "" : peer;
  drawMap(); drawTable(); drawDetails();
  if (scroll) $("details").scrollIntoView({ block: "center" });
  if (!chosen && $("details").contains(document.activeElement)) document.querySelector(`.bar[data-peer="${CSS.escape(had)}"]`)?.focus();
}
async function look() {
  clearTimeout(timer);
  const key = load().key;
  try {
    const response = await fetch("swarm.json", { headers: key ? { Authorization: "Bearer " + key } : {}, signal: AbortSignal.timeout(PATIENCE_MS), cache: "no-store" });
    $("ask").hidden = response.status !== 401;
    if (!response.ok) {
      const said = await response.json().then((body) => body.error.message, () => `This API answered ${response.status}.`);
      trouble = response.status === 401 && !facts ? "" : said;
      if (response.status === 401 && !facts) { put($("headline"), "Who may see the swarm?"); put($("meaning"), key ? said : "Those with a key of this server."); }
    } else {
      const news = await response.json();
      if (facts) compare(facts, news);
      [facts, seenAt, trouble] = [news, performance.now(), ""];
      draw();
    }
  } catch (error) {
    trouble = error.name === "TypeError" || error.name === "TimeoutError" || error.name === "AbortError" ? "This API does not answer." : `This page failed: ${error.message}`;
  }
  tick();
  clearTimeout(timer);  // another look may have begun meanwhile
  timer = setTimeout(look, document.hidden ? 10 * LOOK_MS : LOOK_MS);
}
function tick() {
  const age = performance.now() - seenAt, seconds = Math.round(age / 1000), old = Boolean(facts) && age > OLD_MS;
  document.body.classList.toggle("old", old || Boolean(trouble));
  put($("live"), !facts ? (trouble ? "no answer" : "looking") : old || trouble ? `${seconds} s old` : "live");
  $("trouble").hidden = !trouble;
  put($("trouble"), trouble + (trouble ? (facts ? " What you see is from before. " : " ") + "This page goes on trying." : ""));
}
setInterval(tick, 1000);
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
addEventListener("resize", () => { if (facts) drawMap(); });
$("find").oninput = drawTable;
$("links").ontoggle = () => { if (facts) drawLinks(); };
$("ask").onsubmit = (event) => {
  event.preventDefault();
  try { localStorage.setItem("lilliput.settings", JSON.stringify({ ...load(), key: $("key").value.trim() })); } catch { /* forbidden */ }
  look();
};
$("lanes").onkeydown = (event) => {
  const bars = [...$("lanes").querySelectorAll(".bar")], at = bars.indexOf(document.activeElement);
  const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: bars.length - 1 }[event.key];
  if (at < 0 || to === undefined || !bars[to]) return;
  event.preventDefault();
  bars[at].tabIndex = -1; bars[to].tabIndex = 0; bars[to].focus();
};
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && chosen) choose(""); });
look();
