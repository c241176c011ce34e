// Draw the plots with Plotly, in the colours of the page.

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const AXIS = (text = "") => ({
  gridcolor: colour("--line"), linecolor: colour("--line"), zeroline: false, tickfont: { color: colour("--soft") },
  title: { text, font: { color: colour("--soft"), size: 12 } }, automargin: true, fixedrange: true,
});

const SYMBOLS = { succeeded: "circle", open: "circle-open", rolled_back: "x", superseded: "diamond-open" };
const TONES = { succeeded: "--ok", open: "--info", rolled_back: "--bad", superseded: "--wait" };

// Plotly interprets a few HTML tags in texts, so names that users have chosen are escaped.
function plain(text) {
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

function size({ ready, target, requests, max_nodes }) {
  const most = Math.max(max_nodes, ...ready.y, ...target.y, ...requests.sizes);
  return {
    traces: [
      {
        // Plotly fills gaps of a line, too. So the ground is a trace of its own, without a gap.
        x: ready.x, y: ready.y.map((each) => each ?? 0), mode: "lines", fill: "tozeroy", line: { shape: "hv", width: 0 },
        fillcolor: colour("--info-ground"), hoverinfo: "skip", showlegend: false,
      },
      {
        name: "ready", x: ready.x, y: ready.y, mode: "lines", line: { shape: "hv", color: colour("--plot-1"), width: 2 },
        hovertemplate: "%{y} ready<extra></extra>",
      },
      {
        name: "demand", x: target.x, y: target.y, mode: "lines",
        line: { shape: "hv", color: colour("--plot-2"), width: 2, dash: "dash" }, hovertemplate: "%{y} demanded<extra></extra>",
      },
      {
        name: "request", x: requests.times, y: requests.sizes, text: requests.texts.map(plain), mode: "markers",
        marker: {
          symbol: requests.states.map((state) => SYMBOLS[state] || "circle"), size: 10,
          line: { width: requests.states.map((state) => (state === "open" || state === "superseded" ? 1.6 : 0)) },
          color: requests.states.map((state) => colour(TONES[state] || "--off")),
        },
        hovertemplate: "%{text}<extra></extra>",
      },
    ],
    layout: { yaxis: { ...AXIS("nodes"), range: [0, most + 0.5], dtick: most > 8 ? undefined : 1 }, xaxis: { ...AXIS(), type: "date" } },
  };
}

function curves({ unit, series }) {
  const palette = ["--plot-1", "--plot-2", "--plot-3", "--plot-4"];
  const dashes = ["solid", "dash", "dot", "dashdot"];
  return {
    traces: series.map(({ name, x, y }, index) => ({
      name: plain(name), x, y, mode: x.length > 1 ? "lines" : "markers",
      line: { color: colour(palette[index % 4]), dash: dashes[Math.floor(index / 4) % 4], width: 2 },
      marker: { color: colour(palette[index % 4]) },
    })),
    layout: { xaxis: AXIS(plain(unit)), yaxis: AXIS() },
  };
}

function model({ metric, times, values, versions, promoted }) {
  return {
    traces: [
      {
        name: plain(metric), x: times, y: values, mode: "lines+markers", text: versions.map((each) => `version ${plain(each)}`),
        line: { color: colour("--strong-line"), width: 1 },
        marker: {
          size: promoted.map((each) => (each ? 13 : 9)), symbol: promoted.map((each) => (each ? "star" : "circle-open")),
          color: promoted.map((each) => colour(each ? "--ok" : "--soft")), line: { width: promoted.map((each) => (each ? 0 : 1.6)) },
        },
        hovertemplate: "%{text}: %{y}<extra></extra>", showlegend: false,
      },
      { name: "promoted", x: [null], y: [null], mode: "markers", marker: { symbol: "star", size: 12, color: colour("--ok") } },
      { name: "not promoted", x: [null], y: [null], mode: "markers", marker: { symbol: "circle-open", size: 9, color: colour("--soft"), line: { width: 1.6 } } },
    ],
    layout: { xaxis: { ...AXIS(), type: "date" }, yaxis: AXIS(plain(metric)) },
  };
}

function history({ metric, x, y, best }) {
  return {
    traces: [
      { name: plain(metric), x, y, mode: "markers", marker: { color: colour("--plot-1"), size: 8 }, hovertemplate: "trial %{x}: %{y}<extra></extra>" },
      { name: "best so far", x: best.length ? x : [], y: best, mode: "lines", line: { shape: "hv", color: colour("--plot-2"), width: 2 } },
    ],
    layout: { xaxis: AXIS("trial"), yaxis: AXIS(plain(metric)) },
  };
}

function slices({ metric, params }) {
  const layout = { yaxis: AXIS(plain(metric)), grid: { rows: 1, columns: params.length, pattern: "coupled", xgap: 0.08 }, showlegend: false };
  const traces = params.map(({ name, x, y, numbers }, index) => {
    const axis = index ? index + 1 : "";
    layout[`xaxis${axis}`] = { ...AXIS(plain(name)), type: typeof x[0] === "string" ? "category" : undefined };
    return {
      x: x.map((each) => (typeof each === "string" ? plain(each) : each)), y, text: numbers, xaxis: `x${axis}`, yaxis: "y", mode: "markers",
      marker: { color: colour("--plot-1"), size: 7, opacity: 0.7 }, hovertemplate: "trial %{text}: %{x}, %{y}<extra></extra>",
    };
  });
  return { traces, layout };
}

function bars({ names, values }) {
  return {
    traces: [{
      type: "bar", orientation: "h", x: [...values].reverse(), y: names.map(plain).reverse(), marker: { color: colour("--plot-1") },
      hovertemplate: "%{y}: %{x:.0%}<extra></extra>", showlegend: false,
    }],
    layout: { xaxis: { ...AXIS(), tickformat: ".0%", rangemode: "tozero" }, yaxis: { ...AXIS(), type: "category" } },
  };
}

const KINDS = { size, curves, model, history, slices, bars };

function draw(place) {
  const theme = colour("--ground");
  const drawn = `${theme} ${place.dataset.plot}`;
  if (place.drawnAs === drawn) return;
  place.drawnAs = drawn;
  const data = JSON.parse(place.dataset.plot);
  const { traces, layout } = KINDS[data.kind](data);
  place.dataset.drawn = "1";
  window.Plotly.react(
    place,
    traces,
    {
      showlegend: true, ...layout, margin: { l: 8, r: 12, t: 8, b: 8 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: colour("--ink") },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, hoverlabel: { namelength: -1 }, dragmode: false,
    },
    { displayModeBar: false, responsive: true },
  );
}

function added(element) {
  return new Promise((resolve, reject) => {
    element.addEventListener("load", resolve);
    element.addEventListener("error", reject);
    document.head.append(element);
  });
}

export async function loaded(root) {
  const version = new URL(document.querySelector("script[type=module]").src).search;
  // Plotly adds its rules to the style sheet with this id. Without this style sheet, Plotly would add a style element,
  // which the page's content security policy forbids.
  const sheet = Object.assign(document.createElement("link"), {
    id: "plotly.js-style-global", rel: "stylesheet", href: `${root}static/plot.css${version}`,
  });
  await added(sheet);
  await added(Object.assign(document.createElement("script"), { src: `${root}static/plotly.min.js${version}` }));
  return draw;
}
