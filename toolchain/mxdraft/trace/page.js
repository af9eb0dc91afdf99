"use strict";

// ---- what other settings would do, from the recorded signals; touches nothing of the page ----

// mxd_score(), in single precision as there.
function score(settings, token) {
  const f = Math.fround;
  let sum = f(f(settings.alpha) * f(token.confidence));
  sum = f(sum + f(f(settings.beta) * f(token.attention)));
  sum = f(sum + f(f(settings.gamma) * f(token.history)));
  return f(sum + f(settings.bias));
}

// The scores, and which tokens would be core, due, or stay at base precision: what precision.c does.
function decide(tokens, settings) {
  const f = Math.fround;
  const scores = tokens.map((token) => score(settings, token));
  let pending = 0;
  let threshold = settings.threshold; // follows the text if a fraction is to be kept
  const looks = scores.map((value, i) => {
    let look = "none";
    if (i === 0) look = "all"; // it comes from the prompt's pass
    else if (pending + 1 >= settings.catch_up) look = "due";
    else if (value > threshold) look = "core";
    if (settings.core_fraction !== undefined && (look === "core" || look === "none"))
      threshold = f(threshold + f(f(0.1) * f((look === "core") - f(settings.core_fraction))));
    pending = look === "none" ? pending + 1 : 0;
    return look;
  });
  return { scores, looks };
}

function differs(token) {
  const known = token.base_token != null && token.full_token != null;
  return known ? token.base_token !== token.full_token : null;
}

// The same keys as summary() of page.py.
function summarize(tokens, looks, bytes) {
  const count = (test) => tokens.filter((token, i) => test(token, looks[i], i)).length;
  const decoded = tokens.length - 1;
  const base = count((t, look, i) => i > 0 && (look === "none" || look === "core"));
  const full = count((t, look, i) => i > 0 && look !== "none");
  const known = count((t) => differs(t) !== null);
  return {
    tokens: tokens.length,
    core: count((t, look) => look === "core"),
    due: count((t, look) => look === "due"),
    all: count((t, look) => look === "all"),
    none: count((t, look) => look === "none"),
    bytes: decoded > 0 ? (bytes.base * base + bytes.full * full) / decoded : null,
    differences: known ? count((t) => differs(t)) : null,
    caught: count((t, look) => differs(t) && look !== "none"),
    missed: count((t, look) => differs(t) && look === "none"),
    wasted: count((t, look) => differs(t) === false && look === "core"),
  };
}

// mxd_mixed_bytes(): from where on the engine runs full precision throughout.
function mixedBytes(coreFraction, catchUp, bytes) {
  return bytes.base + (coreFraction + (1 - coreFraction) / catchUp) * bytes.full;
}

const FRACTIONS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75]; // of schedule.py

// The value that this fraction of the numbers exceeds, between two of them as numpy.quantile().
function exceededBy(numbers, fraction) {
  const sorted = [...numbers].sort((a, b) => a - b);
  const place = (1 - fraction) * (sorted.length - 1);
  const low = Math.floor(place);
  const high = Math.min(low + 1, sorted.length - 1);
  return sorted[low] + (place - low) * (sorted[high] - sorted[low]);
}

// Scores of the rows that base precision was asked; of all, if there are none.
function askedScores(tokens, scores) {
  const asked = scores.filter((value, i) => tokens[i].base_token != null);
  return asked.length ? asked : scores;
}

// The schedule's thresholds for these scores, and the core fraction at which they give the chosen threshold.
function thresholds(scores, threshold) {
  const values = FRACTIONS.map((fraction) => exceededBy(scores, fraction));
  const last = values.length - 1;
  values[0] = Math.max(values[0], threshold);
  values[last] = Math.min(values[last], threshold);
  const i = Math.max(1, values.findIndex((value) => value <= threshold));
  const step = values[i] - values[i - 1];
  const share = step === 0 ? 0 : (threshold - values[i - 1]) / step;
  return { values, fraction: FRACTIONS[i - 1] + share * (FRACTIONS[i] - FRACTIONS[i - 1]) };
}

// The schedule with the chosen settings, as a file for `mxdraft pack --schedule`.
function toml(schedule, settings, scores) {
  const number = (x) => String(Number(x.toPrecision(9)));
  const { values, fraction } = thresholds(scores, settings.threshold);
  const { alpha, beta, gamma, bias, catch_up } = settings;
  const chosen = { precision: { alpha, beta, gamma, bias }, core_fraction: fraction, catch_up, thresholds: values };
  const lines = Object.entries({ ...schedule, ...chosen }).map(([name, value]) => {
    if (Array.isArray(value)) return `${name} = [${value.map(number).join(", ")}]`;
    if (typeof value !== "object") return `${name} = ${number(value)}`;
    const pairs = Object.entries(value).map(([key, x]) => `${key} = ${number(x)}`);
    return `${name} = { ${pairs.join(", ")} }`;
  });
  return ["[schedule]", ...lines].join("\n") + "\n";
}

// The settings that the page starts with: the run's; of a run that did not mix, such that a fifth is core.
function recordedSettings(run) {
  const settings = { ...run.schedule.precision, catch_up: run.schedule.catch_up };
  const scores = run.tokens.map((token) => score(settings, token));
  const fifth = scores.length ? exceededBy(askedScores(run.tokens, scores), 0.2) : 0;
  if (run.threshold === null) return { ...settings, threshold: fifth };
  return { ...settings, threshold: run.tokens[0]?.threshold ?? run.threshold, core_fraction: run.schedule.core_fraction };
}

// ---- the page ----

function start() {
  const run = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const spans = [...byId("text").querySelectorAll(".token")];
  const fixed = spans.map((span) => ["drafted", "special"].filter((mark) => span.classList.contains(mark)));
  const controls = [...document.querySelectorAll("input[data-setting]")];
  const started = recordedSettings(run);
  let settings = { ...started };
  let decided = decide(run.tokens, settings);

  // A slider reaches twice as far as anything that the run holds.
  const reach = 2 * Math.max(1, ...Object.values(run.schedule.precision).map(Math.abs), Math.abs(started.threshold));
  for (const control of controls) {
    const name = control.dataset.setting;
    if (control.type === "range" && name !== "catch_up" && name !== "fraction") {
      control.min = -reach;
      control.max = reach;
    }
    control.addEventListener("input", () => {
      const value = control.valueAsNumber;
      if (!Number.isFinite(value) || !control.validity.valid) return;
      const scores = askedScores(run.tokens, decided.scores);
      if (name === "fraction") settings.threshold = exceededBy(scores, value);
      else settings[name] = value;
      if (name === "fraction" || name === "threshold") delete settings.core_fraction; // the threshold stays then
      update(control);
    });
  }
  byId("reset").addEventListener("click", () => {
    settings = { ...started };
    update(null);
  });

  function update(moved) {
    decided = decide(run.tokens, settings);
    const { scores, looks } = decided;
    const asked = askedScores(run.tokens, scores);
    const fraction = asked.length ? asked.filter((value) => value > settings.threshold).length / asked.length : 0;
    for (const control of controls) {
      const value = { ...settings, fraction }[control.dataset.setting];
      if (control !== moved) control.value = control.type === "range" ? value : Number(value.toPrecision(6));
    }
    spans.forEach((span, i) => {
      const difference = differs(run.tokens[i]) ? [looks[i] === "none" ? "missed" : "caught"] : [];
      span.className = ["token", looks[i], ...fixed[i], ...difference].join(" ");
    });
    const counts = summarize(run.tokens, looks, run.weight_bytes);
    for (const cell of document.querySelectorAll("[data-count]")) {
      const value = counts[cell.dataset.count];
      const share = (100 * value / Math.max(1, counts.tokens)).toFixed(1);
      if (value === null) cell.textContent = "not known";
      else if (cell.dataset.count === "bytes") cell.textContent = (value / 2 ** 20).toFixed(1) + " MiB";
      else cell.textContent = cell.dataset.share === undefined ? value : `${value} (${share} %)`;
    }
    const tooMuch = mixedBytes(fraction, settings.catch_up, run.weight_bytes) >= run.weight_bytes.full;
    byId("throughout").hidden = !tooMuch;
    byId("toml").value = asked.length ? toml(run.schedule, settings, asked) : "";
    draw(scores, looks);
    show(current);
  }

  function draw(scores, looks) {
    const low = scores.reduce((a, b) => Math.min(a, b), settings.threshold);
    const high = scores.reduce((a, b) => Math.max(a, b), settings.threshold);
    const y = (value) => (98 - (96 * (value - low)) / (high - low || 1)).toFixed(2);
    const bars = (test) => scores.map((value, i) => (test(looks[i]) ? `M${i + 0.5} 100V${y(value)}` : "")).join("");
    byId("bars-core").setAttribute("d", bars((look) => look === "core"));
    byId("bars-due").setAttribute("d", bars((look) => look === "due"));
    byId("bars-rest").setAttribute("d", bars((look) => look === "none" || look === "all"));
    byId("line").setAttribute("d", `M0 ${y(settings.threshold)}H${scores.length}`);
    byId("range").textContent = `${low.toPrecision(3)} to ${high.toPrecision(3)}`;
    const doubt = run.tokens.map((token, i) => `M${i + 0.5} 100V${(100 - 100 * token.confidence).toFixed(2)}`);
    byId("bars-confidence").setAttribute("d", doubt.join(""));
  }

  // ---- one token's details; arrow keys walk through the text ----

  let current = 0;

  function show(i) {
    const token = run.tokens[i];
    if (!token) return;
    for (const [at, here] of [[current, false], [i, true]]) {
      spans[at].tabIndex = here ? 0 : -1;
      spans[at].setAttribute("aria-selected", here);
    }
    current = i;
    const choice = (id, text) => (id == null ? "not known" : `${id} ${JSON.stringify(text)}`);
    const values = {
      position: token.position,
      token: choice(token.token, token.text) + (token.bytes ? ` bytes ${token.bytes}` : ""),
      base: choice(token.base_token, token.base_text),
      full: choice(token.full_token, token.full_text),
      look: `${token.look}; with these settings: ${decided.looks[i]}`,
      drafted: token.drafted ? "yes" : "no",
      signals: ["confidence", "attention", "history"].map((name) => `${name} ${token[name].toFixed(4)}`).join(", "),
      margin: `${token.margin.toFixed(4)} nat`,
      score: `${token.score.toPrecision(5)}; with these settings: ${decided.scores[i].toPrecision(5)}`,
      tier: token.tier ?? "not recorded",
    };
    for (const [name, value] of Object.entries(values)) byId(`of-${name}`).textContent = value;
  }

  const indexOf = (event) => spans.indexOf(event.target.closest(".token"));
  for (const kind of ["focusin", "mouseover"])
    byId("text").addEventListener(kind, (event) => indexOf(event) >= 0 && show(indexOf(event)));
  byId("text").addEventListener("keydown", (event) => {
    const last = spans.length - 1;
    const goal = { ArrowLeft: current - 1, ArrowRight: current + 1, Home: 0, End: last }[event.key];
    if (goal === undefined || goal < 0 || goal > last) return;
    event.preventDefault();
    spans[goal].focus();
  });
  for (const chart of document.querySelectorAll("svg"))
    chart.addEventListener("mousemove", (event) => {
      const box = chart.getBoundingClientRect();
      show(Math.min(spans.length - 1, Math.floor(((event.clientX - box.left) / box.width) * spans.length)));
    });

  update(null);
}

if (typeof document !== "undefined") start();
