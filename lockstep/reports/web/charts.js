// The charts of a report. The page holds numbers as JSON (charts.py writes it), Plotly draws them, and this file follows
// the controls above them. Functions before start() touch neither the page nor Plotly, so that node can test them.
"use strict";

const DASHES = ["solid", "dash", "dot"];
const OWN = "own"; // the name of an axis that the controls do not change

/** Centred moving average over a share of a curve, in percent; near the ends the window shrinks symmetrically. */
function smoothed(values, percent) {
  const half = Math.round((values.length * percent) / 200);
  return values.map((value, place) => {
    const reach = Math.min(half, place, values.length - 1 - place);
    const known = values.slice(place - reach, place + reach + 1).filter((each) => each !== null);
    return value === null || !known.length ? null : known.reduce((sum, each) => sum + each, 0) / known.length;
  });
}

/** Which runs are shown: their method is not hidden, their text has every word, and no axis left them out. */
function shownRuns(runs, state) {
  const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
  return runs.map(
    (run, place) =>
      !state.hidden.has(run.method) &&
      words.every((word) => run.text.toLowerCase().includes(word)) &&
      (!state.chosen || state.chosen.has(place)),
  );
}

/** The lines of a chart as they are to be drawn: {line, x, y, low, high, thin}. */
function shownLines(chart, shared, shown, state) {
  const axis = chart.own ? OWN : state.x;
  const complete = new Set(); // methods whose mean is drawn: a mean of runs that are not all shown would mislead
  const bands = new Set();
  for (const line of chart.lines)
    if (line.role === "middle" && line.runs.every((run) => shown[run])) {
      const at = line.by ? line.by[axis] : line.x[axis] !== undefined;
      if (at) complete.add(line.method);
      if (at && at.low) bands.add(line.method);
    }
  return chart.lines.flatMap((line) => {
    const single = line.role === "single";
    if (single ? !shown[line.runs[0]] : !complete.has(line.method)) return [];
    if (single && bands.has(line.method) && !state.seeds) return [];
    const at = line.by ? line.by[axis] : { x: shared[line.x[axis]], y: line.y, mean: line.mean };
    if (!at || !at.x) return [];
    const smooth = (values) => (values && state.smooth && !chart.own ? smoothed(values, state.smooth) : values);
    const y = state.smooth && !chart.own ? smooth(at.mean || at.y) : at.y;
    return [{ line, x: at.x, y, low: smooth(at.low), high: smooth(at.high), thin: single && complete.has(line.method) }];
  });
}

/** Whether an axis can be logarithmic: it has numbers above zero only. */
function positive(rows) {
  return rows.every((row) => (row || []).every((value) => value === null || value > 0));
}

/** Plotly's traces and layout of a chart of curves. */
function curves(chart, page, state, theme) {
  const shown = shownRuns(page.runs, state);
  const lines = shownLines(chart, chart.shared, shown, state);
  const data = [];
  for (const { line, x, y, low, high, thin } of lines) {
    const color = theme.colors[line.method % theme.colors.length];
    const dash = DASHES[Math.floor(line.method / theme.colors.length) % DASHES.length];
    const trace = { type: "scatter", mode: x.length < 3 ? "lines+markers" : "lines", x };
    if (low) {
      const bare = { ...trace, mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
      data.push({ ...bare, y: low }, { ...bare, y: high, fill: "tonexty", fillcolor: color + "2e" });
    }
    const one = line.runs.length === 1 && page.runs[line.runs[0]];
    const name = one ? one.name + (one.name.includes(one.seed) ? "" : `, seed ${one.seed}`) : "";
    const label = [page.methods[line.method], name].filter(Boolean).map(escaped).join("<br>");
    const band = low ? `<br>95%: %{customdata[0]:.4~g} to %{customdata[1]:.4~g}` : "";
    data.push({
      ...trace,
      y,
      customdata: low && low.map((value, place) => [value, high[place]]),
      line: { color, dash, width: thin ? 1 : 2 },
      opacity: thin ? 0.45 : 1,
      hovertemplate: `<b>%{y:.5~g}</b> at %{x:,.5~g}${band}<br>${label}<extra></extra>`,
    });
  }
  const log = (wanted, rows) => (wanted && !chart.own && positive(rows) ? "log" : "linear");
  const type = log(state.logY, lines.flatMap((each) => [each.y, each.low]));
  const layout = {
    xaxis: { title: { text: chart.own || page.axes[state.x] }, type: log(state.logX, lines.map((each) => each.x)) },
    yaxis: { type, range: type === "linear" ? chart.range : undefined },
  };
  return { data, layout };
}

/** Plotly's traces and layout of dots with intervals. */
function intervals(chart, page, state, theme) {
  const rows = chart.rows.filter((row) => !state.hidden.has(row.method));
  const data = rows.map((row) => {
    const color = theme.colors[row.method % theme.colors.length];
    const [low, high] = row.interval || [row.value, row.value];
    return {
      type: "scatter",
      mode: "markers",
      x: [row.value],
      y: [row.name],
      marker: { color, size: 10 },
      error_x: { type: "data", array: [high - row.value], arrayminus: [row.value - low], color, thickness: 3, width: 0 },
      hovertemplate: `${escaped(row.name)}<br><b>${row.text}</b><extra></extra>`,
    };
  });
  const short = (name) => (name.length > 24 ? name.slice(0, 23) + "…" : name);
  const names = rows.map((row) => row.name);
  const yaxis = { autorange: "reversed", tickvals: names, ticktext: names.map((name) => escaped(short(name))) };
  return { data, layout: { height: 70 + 28 * rows.length, xaxis: {}, yaxis } };
}

/** Plotly's parallel coordinates: the last axis, the score, gives each run its color. */
function parallel(chart, page, state, theme) {
  const shown = shownRuns(page.runs, { ...state, chosen: null });
  const kept = chart.runs.map((run, place) => place).filter((place) => shown[chart.runs[place]]);
  const dimensions = chart.axes.map((axis) => {
    const low = Math.min(...axis.values);
    const high = Math.max(...axis.values);
    const room = low === high ? Math.abs(low) * 0.1 || 1 : 0;
    const ends = { range: [low - room, high + room], values: kept.map((place) => axis.values[place]) };
    const label = axis.label.length > 22 ? "…" + axis.label.slice(-21) : axis.label;
    if (axis.words) return { ...ends, label, tickvals: axis.words.map((_, place) => place), ticktext: axis.words };
    if (!axis.log) return { ...ends, label };
    const powers = Array.from({ length: Math.floor(high) - Math.ceil(low) + 1 }, (_, place) => Math.ceil(low) + place);
    const apart = (high - low) / 12; // so that no two ticks lie on each other
    const tickvals = [low, ...powers.filter((power) => power - low > apart && high - power > apart), high];
    return { ...ends, label, tickvals, ticktext: tickvals.map((power) => String(Number((10 ** power).toPrecision(2)))) };
  });
  const score = dimensions[dimensions.length - 1];
  const line = { color: score.values, cmin: score.range[0], cmax: score.range[1], colorscale: theme.scale };
  const text = { color: theme.text, size: 11 };
  const data = [{ type: "parcoords", dimensions, line, labelfont: { color: theme.text, size: 12 }, tickfont: text }];
  data[0].rangefont = { ...text, color: "rgba(0,0,0,0)" }; // beside the ticks it is said twice
  data[0].unselected = { line: { color: theme.muted, opacity: 0.1 } };
  return { data, layout: { margin: { l: 70, r: 60, t: 50, b: 24 } }, kept: kept.map((place) => chart.runs[place]) };
}

/** The runs that lie within every range that the reader has marked on axes; null where none is marked. */
function chosenRuns(dimensions, runs) {
  const marked = dimensions.filter((each) => each.constraintrange);
  if (!marked.length) return null;
  const within = (each, place) => {
    const ranges = Array.isArray(each.constraintrange[0]) ? each.constraintrange : [each.constraintrange];
    return ranges.some(([low, high]) => each.values[place] >= low && each.values[place] <= high);
  };
  return new Set(runs.filter((_, place) => marked.every((each) => within(each, place))));
}

function escaped(text) {
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

const KINDS = { curves, intervals, parallel };

async function start() {
  const read = (element) => JSON.parse(element.textContent);
  const page = read(document.getElementById("page"));
  const controls = document.getElementById("controls");
  const state = { x: "samples", smooth: 0, logX: false, logY: false, seeds: false, filter: "", hidden: new Set(), chosen: null };
  const charts = new Map(); // element -> what it shows
  for (const group of document.querySelectorAll(".charts")) {
    const { shared, charts: specs } = read(group.querySelector("script"));
    group.querySelectorAll(".chart").forEach((element, place) => charts.set(element, { ...specs[place], shared }));
  }
  if (!charts.size) return;
  await loadPlotly();

  function theme() {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const colors = Array.from({ length: 8 }, (_, number) => color(`--c${number}`));
    const scale = [color("--low"), color("--middle"), color("--high")].map((each, place) => [place / 2, each]);
    return { colors, scale, ...Object.fromEntries(["text", "muted", "rule", "card"].map((n) => [n, color(`--${n}`)])) };
  }

  function draw(element) {
    const chart = charts.get(element);
    const look = theme();
    const { data, layout, kept } = KINDS[chart.kind](chart, page, state, look);
    const axis = { gridcolor: look.rule, zeroline: false, linecolor: look.rule, automargin: true, exponentformat: "SI" };
    for (const name of ["xaxis", "yaxis"]) if (layout[name]) layout[name] = { ...axis, ...layout[name] };
    const mouse = matchMedia("(hover: hover)").matches; // elsewhere a finger that drags wants to scroll
    const whole = {
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: look.muted },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 44, r: 12, t: 12, b: 40 },
      showlegend: false,
      hovermode: "closest",
      hoverdistance: 60,
      hoverlabel: { bgcolor: look.card, bordercolor: look.muted, font: { color: look.text }, align: "left" },
      dragmode: mouse ? "zoom" : false,
      modebar: { bgcolor: "rgba(0,0,0,0)", color: look.muted, activecolor: look.text },
      uirevision: [state.x, state.logX, state.logY].join(), // a zoom lasts as long as its axes
      width: Math.max(element.clientWidth, chart.kind === "parallel" ? 110 * chart.axes.length : 0),
      height: layout.height || element.clientHeight,
      ...layout,
    };
    const buttons = [["zoom2d", "pan2d", "resetScale2d", "toImage"]];
    const config = { responsive: true, displaylogo: false, modeBarButtons: buttons, displayModeBar: mouse ? "hover" : false };
    config.toImageButtonOptions = { format: "svg", filename: "chart" };
    if (!element.classList.contains("drawn")) element.replaceChildren();
    element.classList.add("drawn");
    chart.due = false;
    if (chart.kind === "parallel") {
      delete config.modeBarButtons;
      config.displayModeBar = false;
      data[0].dimensions.forEach((each, place) => {
        const range = chart.marked && chart.marked[place];
        if (range) each.constraintrange = range;
      });
    }
    Plotly.react(element, data, whole, config);
    if (chart.kind === "parallel" && !chart.followed) {
      chart.followed = true;
      element.on("plotly_restyle", () => {
        const found = element.data[0].dimensions;
        chart.marked = found.map((each) => each.constraintrange);
        state.chosen = chosenRuns(found, chart.kept);
        update(element);
      });
    }
    chart.kept = kept;
  }

  const near = new Set();
  const watch = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) {
        if (isIntersecting) near.add(target);
        else near.delete(target);
        if (isIntersecting && charts.get(target).due) draw(target);
      }
    },
    { rootMargin: "600px" },
  );

  function update(except) {
    for (const [element, chart] of charts) {
      if (element === except) continue;
      chart.due = true;
      if (near.has(element)) draw(element);
    }
    const shown = shownRuns(page.runs, state);
    const count = shown.filter(Boolean).length;
    controls.querySelector("output[name=count]").value = count < shown.length ? `${count} of ${shown.length} runs` : "";
    document.querySelectorAll("tr[data-run]").forEach((row) => (row.hidden = !shown[Number(row.dataset.run)]));
    for (const button of controls.querySelectorAll("[data-method]"))
      button.setAttribute("aria-pressed", String(!state.hidden.has(Number(button.dataset.method))));
  }

  function redraw() {
    for (const [element] of charts) if (element.offsetParent) draw(element);
  }

  const form = controls.querySelector("form");
  form.hidden = false;
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => {
    const given = form.elements;
    state.x = given.x.value;
    state.smooth = Number(given.smooth.value);
    given.percent.value = state.smooth ? `${state.smooth}%` : "off";
    state.logX = given.logX.checked;
    state.logY = given.logY.checked;
    state.seeds = Boolean(given.seeds && given.seeds.checked);
    state.filter = given.filter.value;
    update();
  });
  controls.addEventListener("click", ({ target, detail }) => {
    const button = target.closest("[data-method]");
    if (!button) return;
    const method = Number(button.dataset.method);
    const others = page.methods.map((_, number) => number).filter((number) => number !== method);
    if (detail === 2) {
      const alone = others.every((number) => state.hidden.has(number));
      state.hidden = new Set(alone ? [] : others);
    } else if (!state.hidden.delete(method)) state.hidden.add(method);
    update();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  const paper = (on) => {
    document.documentElement.classList.toggle("paper", on); // page.css: the width and the colors of a sheet
    redraw();
  };
  addEventListener("beforeprint", () => paper(true));
  addEventListener("afterprint", () => paper(false));
  form.reset();
  update();
  for (const element of charts.keys()) watch.observe(element);
}

/** Plotly is in the page too, compressed. */
async function loadPlotly() {
  const packed = document.getElementById("plotly").textContent;
  const bytes = Uint8Array.from(atob(packed), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}

if (typeof document !== "undefined") start();
else module.exports = { smoothed, shownRuns, shownLines, curves, intervals, parallel, chosenRuns };
