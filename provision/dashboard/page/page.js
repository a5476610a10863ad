"use strict";
// Asks for data.json every second and changes what differs; hosts come only when they were observed again. All text goes in as text, never as HTML.

const PERIOD = 1000; // milliseconds between requests
const STALE = 2; // failed requests after which the page says so
const ACTIVE = ["prepared", "starting", "running", "scaling", "stopping"];
const LOOK = { done: "good", failed: "bad", unreadable: "bad", interrupted: "wait" };

const PAGE = 50; // hosts in the table at once
const MOST_NEWS = 5; // changes that screen readers are told at once

let failures = 0;
let last = null; // what was shown of the hosts
let seen = { at: null, list: [] }; // the hosts as they came last
let first = 0; // the number of the first host in the table
const states = new Map(); // what screen readers were told of

function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Makes `old` what `fresh` is and keeps what is the same: focus, selection and opened details stay.
function morph(old, fresh) {
  const key = (node) => (node.getAttribute ? node.getAttribute("data-key") : null);
  if (old.nodeName !== fresh.nodeName || key(old) !== key(fresh)) return old.replaceWith(fresh);
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return undefined;
  }
  for (const name of old.getAttributeNames()) {
    if (name !== "open" && !fresh.hasAttribute(name)) old.removeAttribute(name);
  }
  for (const name of fresh.getAttributeNames()) {
    if (old.getAttribute(name) !== fresh.getAttribute(name)) old.setAttribute(name, fresh.getAttribute(name));
  }
  const before = [...old.childNodes];
  const after = [...fresh.childNodes];
  const rows = new Map(before.filter(key).map((node) => [key(node), node]));
  if (rows.size && after.every(key)) {
    const kept = after.map((node) => {
      const row = rows.get(key(node));
      if (row) morph(row, node);
      return row || node;
    });
    const moved = kept.length !== before.length || kept.some((node, place) => node !== before[place]);
    if (moved) old.replaceChildren(...kept);
    return undefined;
  }
  after.forEach((node, place) => (place < before.length ? morph(before[place], node) : old.append(node)));
  before.slice(after.length).forEach((node) => node.remove());
  return undefined;
}

function show(id, ...children) {
  const place = document.getElementById(id);
  const fresh = place.cloneNode(false);
  fresh.append(...children.flat().filter(Boolean));
  morph(place, fresh);
}

const known = (value) => value !== null && value !== undefined;
const number = (value, digits = 0) =>
  known(value) ? value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) : "–";

function bytes(value) {
  if (!known(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${number(value, value < 10 && unit > 1 ? 1 : 0)} ${units[unit]}`;
}

function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 90) return `${whole} s`;
  if (whole < 5400) return `${Math.round(whole / 60)} min`;
  return whole < 129600 ? `${Math.round(whole / 3600)} h` : `${Math.round(whole / 86400)} days`;
}

const badge = (text, look) => el("span", { class: `badge ${look}` }, text);
const tile = (value, name, look) => el("div", { class: look }, el("strong", {}, value), el("span", {}, name));

// Columns: name, value of a row (text or nodes), and whether it is a number.
// With `key`, what was opened in a row stays with the row of that key.
function table(caption, columns, rows, key = () => null) {
  const head = columns.map(([name, , right]) => el("th", { scope: "col", role: "columnheader", class: right && "number" }, name));
  const body = rows.map((row) =>
    el("tr", { role: "row", "data-key": key(row) }, columns.map(([name, value, right], place) => {
      const content = value(row);
      const empty = content === "" || content === "–";
      if (place === 0) return el("th", { scope: "row", role: "rowheader" }, content);
      const kind = [right && "number", empty && "empty"].filter(Boolean).join(" ") || null;
      return el("td", { class: kind, role: "cell", "data-label": name }, el("div", {}, content));
    })),
  );
  // The roles are said because a phone's style makes blocks of all of it, which is no table to browsers.
  return el("div", { class: "scroll" },
    el("table", { role: "table" }, caption ? el("caption", {}, caption) : null,
      el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, head)), el("tbody", { role: "rowgroup" }, body)));
}

function chart(title, steps, values, digits, second) {
  const points = steps.map((step, place) => [step, values[place]]).filter(([, value]) => known(value));
  if (points.length < 2) return null;
  const level = points.map(([, value]) => value);
  const low = second ? Math.min(...level) : 0;
  const high = Math.max(...level) || 1;
  const [first, last] = [points[0][0], points[points.length - 1][0]];
  const x = (step) => (((step - first) / (last - first || 1)) * 300).toFixed(1);
  const y = (value) => (78 - ((value - low) / (high - low || 1)) * 76).toFixed(1);
  const line = points.map(([step, value]) => `${x(step)} ${y(value)}`).join("L");
  const shape = second ? [] : [svg("path", { class: "area", d: `M0 80L${line}L300 80Z` })];
  const said = `${title}: ${number(level[level.length - 1], digits)} now, between ${number(Math.min(...level), digits)} ` +
    `and ${number(high, digits)} from step ${number(first)} to ${number(last)}`;
  return el("figure", {}, el("figcaption", {}, title),
    el("div", { class: second ? "plot second" : "plot" },
      el("div", { class: "scale" }, el("span", {}, number(high, digits)), el("span", {}, number(low, digits))),
      svg("svg", { viewBox: "0 0 300 80", preserveAspectRatio: "none", role: "img", "aria-label": said }, ...shape, svg("path", { d: `M${line}` })),
      el("div", { class: "steps" }, el("span", {}, `step ${number(first)}`), el("span", {}, number(last)))));
}

function processes(job) {
  const server = (entry) => entry.role === "parameter_server";
  const total = (entry) => Object.values(entry.tables || {}).reduce((sum, rows) => sum + rows, 0);
  const look = { runs: "good", starts: "run", ended: job.state === "done" ? "good" : "wait" };
  return table("Processes", [
    ["process", (entry) => entry.name],
    ["host", (entry) => entry.host],
    ["state", (entry) => [badge(entry.state, look[entry.state] || "bad"),
      entry.trouble ? el("span", { class: "more bad" }, entry.trouble) : null].filter(Boolean)],
    ["rows", (entry) => (total(entry) ? number(total(entry)) : ""), true],
    ["DRAM", (entry) => bytes(entry.dram_bytes), true],
    ["PMem", (entry) => (server(entry) ? bytes(entry.pmem_bytes) : ""), true],
    ["pulled keys/s", (entry) => (server(entry) ? number(entry.pulled_keys_per_s) : ""), true],
    ["pushed keys/s", (entry) => (server(entry) ? number(entry.pushed_keys_per_s) : ""), true],
  ], job.processes);
}

function checkpoints(job, now) {
  const found = [...job.course.checkpoints].reverse();
  const age = (event) => {
    const at = Date.parse(event.time) / 1000;
    return Number.isNaN(at) ? "–" : `${duration(now - at)} ago`;
  };
  return found.length === 0 ? null : el("details", { class: "checkpoints" }, el("summary", {}, "Last checkpoints"), table("", [
    ["step", (event) => number(event.step)],
    ["written", age],
    ["took", (event) => (known(event.seconds) ? `${number(event.seconds, 2)} s` : "–"), true],
    ["rows in", (event) => event.rows || "–"],
  ], found));
}

function jobCard(job, now) {
  const running = ACTIVE.includes(job.state);
  const held = job.eval || {};
  const done = known(job.step) ? `step ${number(job.step)} of ${known(job.steps) ? number(job.steps) : "?"}` : "no step yet";
  const rows = Object.values(job.rows || {}).reduce((sum, count) => sum + count, 0);
  const sum = (field) => {
    const values = job.processes.map((entry) => entry[field]).filter(known);
    return values.length ? values.reduce((a, b) => a + b, 0) : null;
  };
  const tiles = [
    tile(number(job.samples_per_s), "samples/s"),
    tile(number(known(held.loss) ? held.loss : job.loss, 4), known(held.loss) ? "loss, held-out rows" : "loss"),
    tile(number(known(held.auc) ? held.auc : job.auc, 4), known(held.auc) ? "AUC, held-out rows" : "AUC"),
    running && known(job.eta_s) ? tile(duration(job.eta_s), "left") : null,
    tile(known(job.checkpoint_step) ? number(job.checkpoint_step) : "none", "checkpoint at step"),
    rows ? tile(number(rows), "rows on servers") : null,
    known(sum("pulled_keys_per_s")) ? tile(number(sum("pulled_keys_per_s")), "keys pulled/s") : null,
  ].filter(Boolean);
  const course = job.course;
  return el("article", { class: "card", "aria-label": `job ${job.job}`, "data-job": job.job },
    el("div", { class: "head" }, el("h3", {}, job.job), badge(job.state, LOOK[job.state] || "run"), el("span", { class: "soft step" }, done)),
    job.state !== "done" && job.message ? el("p", { class: running ? "message wait" : "message" }, job.message) : null,
    running && job.waiting ? el("p", { class: "message wait" }, `Training waits for a server: ${job.waiting}`) : null,
    known(job.steps) && job.steps ? el("progress", { max: job.steps, value: job.step || 0, "aria-label": `progress of ${job.job}` }) : null,
    el("div", { class: "tiles" }, tiles),
    el("div", { class: "charts" }, [
      chart("Throughput, samples/s", course.step, course.samples_per_s, 0, false),
      chart("Loss", course.step, course.loss, 3, true),
      chart("Freshness, seconds from a step to answers of it", course.fresh_step, course.fresh_s, 2, false)].filter(Boolean)),
    job.processes.length ? processes(job) : null,
    checkpoints(job, now));
}

function clusterCard(job) {
  const pods = job.pods.length === 0 ? null : table("Pods", [
    ["pod", (pod) => pod.name],
    ["node", (pod) => pod.node || "–"],
    ["state", (pod) => [badge(pod.state, pod.ready ? "good" : "wait"), pod.trouble ? el("span", { class: "more bad" }, pod.trouble) : null].filter(Boolean)],
    ["restarts", (pod) => number(pod.restarts), true],
  ], job.pods);
  return el("article", { class: "card", "aria-label": `job ${job.job}`, "data-job": job.job },
    el("div", { class: "head" }, el("h3", {}, job.job), badge(job.state, LOOK[job.state] || "run"),
      el("span", { class: "soft" }, `Kubernetes, namespace ${job.namespace}`)),
    job.progress ? el("p", {}, job.progress) : null,
    [job.message, job.problem].filter(Boolean).map((line) => el("p", { class: "message" }, line)),
    pods);
}

function earlier(jobs) {
  return jobs.length === 0 ? null : el("div", { class: "card" }, table("Other jobs", [
    ["job", (job) => job.job],
    ["state", (job) => [badge(job.state, LOOK[job.state] || "run"),
      job.state !== "done" && job.message ? el("span", { class: "more" }, job.message) : null].filter(Boolean)],
    ["step", (job) => (known(job.step) ? `${number(job.step)} / ${known(job.steps) ? number(job.steps) : "?"}` : "–"), true],
    ["AUC", (job) => number((job.eval && job.eval.auc) ?? job.auc, 4), true],
    ["samples/s", (job) => number(job.samples_per_s), true],
    ["checkpoint", (job) => (known(job.checkpoint_step) ? number(job.checkpoint_step) : "–"), true],
  ], jobs));
}

function showJobs(part, now) {
  const detailed = part.list.filter((job) => job.detailed && (job.course || job.on));
  const rest = part.list.filter((job) => !detailed.includes(job));
  show("jobs", part.trouble ? el("p", { class: "message" }, part.trouble) : null,
    part.list.length || part.trouble ? null : el("div", { class: "card" }, el("p", {}, "No jobs yet. Start one with ", el("code", {}, "oeprov launch-training"), ".")),
    detailed.map((job) => (job.on === "kubernetes" ? clusterCard(job) : jobCard(job, now))),
    earlier(rest));
}

function hostState(host) {
  const lines = [];
  if (host.error) lines.push(badge("cannot be reached", "bad"), el("span", { class: "more bad" }, host.error));
  else if (host.problems.length) lines.push(badge("problem", "bad"), ...host.problems.map((line) => el("span", { class: "more bad" }, line)));
  else if (host.steps.length) lines.push(badge("not what is asked for", "wait"));
  else lines.push(badge("ready", "good"));
  if ((host.steps || []).length) {
    lines.push(el("details", {}, el("summary", {}, `${host.steps.length} step${host.steps.length > 1 ? "s" : ""} to do`),
      host.steps.map((step) => el("span", { class: "more" }, step.what))));
  }
  for (const job of host.jobs || []) lines.push(el("span", { class: "more" }, `runs servers of ${job}`));
  return lines;
}

function mode(host) {
  if (host.error) return `wanted: ${host.wanted_mode}`;
  const other = host.mode !== host.wanted_mode ? [el("span", { class: "more wait" }, `the inventory asks for ${host.wanted_mode}`)] : [];
  return [host.mode, ...other, ...host.places.map((line) => el("span", { class: "more" }, line))];
}

const STATES = ["cannot be reached", "problem", "not what is asked for", "ready"];

function stateOf(host) {
  if (host.error) return STATES[0];
  if (host.problems.length) return STATES[1];
  return host.steps.length ? STATES[2] : STATES[3];
}

// Each word must be somewhere in what is known of the host.
function matches(host, words) {
  const text = [host.host, host.kind, host.error, host.mode, host.os, host.kernel, ...host.roles, ...(host.gpus || []), ...(host.problems || [])].join(" ").toLowerCase();
  return words.every((word) => text.includes(word));
}

// The hosts of one page; few hosts have neither filters nor pages.
function selected(hosts) {
  const form = document.getElementById("filter");
  form.hidden = hosts.length <= PAGE;
  if (form.hidden) return hosts;
  const choice = document.getElementById("state").value;
  const words = document.getElementById("words").value.toLowerCase().split(/\s+/).filter(Boolean);
  const named = hosts.filter((host) => matches(host, words));
  const option = (value, name, list) => el("option", { value }, `${name} (${number(list.length)})`);
  show("state", option("", "all", named), STATES.map((state) => option(state, state, named.filter((host) => stateOf(host) === state))));
  document.getElementById("state").value = choice; // options that are moved in one by one select the last
  const found = choice ? named.filter((host) => stateOf(host) === choice) : named;
  first = Math.max(0, Math.min(first, Math.floor((found.length - 1) / PAGE) * PAGE));
  const end = Math.min(first + PAGE, found.length);
  show("shown", found.length ? `${number(first + 1)} to ${number(end)} of ${number(found.length)}` : "no such host");
  document.getElementById("previous").disabled = first === 0;
  document.getElementById("next").disabled = end === found.length;
  return found.slice(first, end);
}

function turn(pages) {
  first = pages ? first + pages * PAGE : 0;
  if (last) showHosts(...last);
}

function showHosts(part, now, every) {
  last = [part, now, every];
  const machine = (host) => (host.error ? "–" : [host.os || "–", el("span", { class: "more" }, host.kernel), ...host.gpus.map((name) => el("span", { class: "more" }, name))]);
  const columns = [
    ["host", (host) => host.host],
    ["state", hostState],
    ["role", (host) => [host.roles.join(", ") || "none", el("span", { class: "more" }, `kind ${host.kind}`)]],
    ["persistent memory", mode],
    ["DRAM", (host) => bytes(host.dram_bytes), true],
    ["PMem", (host) => bytes(host.pmem_bytes), true],
    ["system, kernel", machine],
  ];
  // Whoever needs somebody comes first.
  const rank = (host) => (host.error ? 0 : host.ready ? 2 : 1);
  const hosts = [...part.list].sort((a, b) => rank(a) - rank(b));
  const caption = part.at ? `seen ${duration(now - part.at)} ago, every ${duration(every)}` : "";
  show("hosts", part.trouble ? el("p", { class: "message" }, part.trouble) : null,
    part.at ? el("div", { class: "card" }, table(caption, columns, selected(hosts), (host) => host.host)) : part.trouble ? null : el("p", { class: "soft" }, "Looking at the hosts …"));
}

function showTiles(data) {
  const hosts = data.hosts.list;
  const lost = hosts.filter((host) => host.error).length;
  const unready = hosts.filter((host) => !host.error && !host.ready).length;
  const running = data.jobs.list.filter((job) => ACTIVE.includes(job.state));
  const speed = running.map((job) => job.samples_per_s).filter(known).reduce((a, b) => a + b, 0);
  const saved = data.jobs.list.flatMap((job) => (job.course ? job.course.checkpoints : []))
    .map((event) => Date.parse(event.time) / 1000).filter((at) => !Number.isNaN(at));
  show("tiles",
    data.hosts.at ? tile(`${hosts.length - lost} of ${hosts.length}`, "hosts reachable", lost ? "bad" : null) : tile("…", "hosts reachable"),
    data.hosts.at ? tile(`${hosts.length - lost - unready}`, "ready") : tile("…", "ready"),
    tile(number(running.length), running.length === 1 ? "job running" : "jobs running"),
    tile(running.length ? number(speed) : "–", "samples/s"),
    tile(saved.length ? duration(data.now - Math.max(...saved)) : "–", "since the last checkpoint"));
}

// Screen readers hear of changes of state only, not of every number.
function tell(data) {
  const now = new Map();
  for (const job of data.jobs.list) now.set(`job ${job.job}`, job.state);
  for (const host of data.hosts.list) now.set(`host ${host.host}`, host.error ? "cannot be reached" : "reachable");
  const news = [...now].filter(([name, state]) => states.has(name) && states.get(name) !== state);
  now.forEach((state, name) => states.set(name, state));
  const more = news.length > MOST_NEWS ? [`${number(news.length - MOST_NEWS)} more changes`] : [];
  if (news.length) show("news", [...news.slice(0, MOST_NEWS).map(([name, state]) => `${name}: ${state}`), ...more].join(". "));
}

function warn(text) {
  const place = document.getElementById("alert");
  place.hidden = !text;
  if (place.textContent !== text) place.textContent = text;
}

async function refresh() {
  try {
    const answer = await fetch(known(seen.at) ? `data.json?hosts=${seen.at}` : "data.json", { cache: "no-store", signal: AbortSignal.timeout(10000) });
    if (!answer.ok) throw new Error(`the answer was ${answer.status}`);
    const data = await answer.json();
    if (data.hosts.list) seen = data.hosts;
    else data.hosts.list = seen.list;
    failures = 0;
    warn("");
    const running = data.jobs.list.filter((job) => ACTIVE.includes(job.state)).map((job) => job.job);
    document.title = [...running, data.cluster, "oeprov"].join(" · ");
    show("cluster", data.cluster);
    show("source", data.inventory);
    showTiles(data);
    if (data.jobs.at || data.jobs.trouble) showJobs(data.jobs, data.now);
    showHosts(data.hosts, data.now, data.hosts_seconds);
    tell(data);
  } catch (error) {
    failures += 1;
    if (failures >= STALE) warn("oeprov dashboard does not answer any more: what is shown is old. Start it again and open the address that it prints.");
    console.warn(error);
  }
  setTimeout(refresh, PERIOD);
}

document.getElementById("filter").addEventListener("submit", (event) => event.preventDefault());
document.getElementById("words").addEventListener("input", () => turn(0));
document.getElementById("state").addEventListener("change", () => turn(0));
document.getElementById("previous").addEventListener("click", () => turn(-1));
document.getElementById("next").addEventListener("click", () => turn(1));
refresh();
