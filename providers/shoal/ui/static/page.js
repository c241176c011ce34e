// The page can be read without this script. The script keeps the page up to date, shows local times, and sends actions.
import { morph } from "./morph.js";
import { shownTimes } from "./times.js";

const root = document.documentElement.dataset.root;
const main = document.getElementById("main");
const live = document.getElementById("live");
const notice = document.getElementById("notice");
const dialog = document.getElementById("confirm");

function setLive(isLive) {
  const text = isLive ? "live" : "not live";
  if (live.textContent !== text) live.textContent = text;
  live.classList.toggle("on", isLive);
}

// --- the newest contents

let isAsking = false;
let isOld = false;

async function refresh() {
  if (isAsking) { isOld = true; return; }
  isAsking = true;
  try {
    const answer = await fetch(location.href, { headers: { "X-Shoal-Fragment": "1", Accept: "text/html" } });
    if (answer.status === 401 || answer.status === 403) { location.reload(); return; }
    if (answer.ok) {
      const parsed = new DOMParser().parseFromString(`<main id="main">${await answer.text()}</main>`, "text/html");
      morph(main, parsed.getElementById("main"));
      shown();
    } else if (answer.status === 404) {
      say("the pool, job or model of this page does not exist any more", true);
    }
  } catch {
    setLive(false);  // when the stream of events is connected again, it calls refresh() again
  } finally {
    isAsking = false;
    if (isOld) { isOld = false; refresh(); }
  }
}

// --- events. A hidden page closes its connection, because browsers allow only six connections to a server.

let stream = null;
let wasOpen = false;

function connect() {
  if (stream || document.hidden) return;
  stream = new EventSource(`${root}api/events`);
  stream.addEventListener("open", () => { setLive(true); if (wasOpen) refresh(); wasOpen = true; });
  stream.addEventListener("changed", refresh);
  stream.addEventListener("error", () => {
    setLive(false);
    // The server answered with an error, so the browser does not try again by itself.
    if (stream && stream.readyState === EventSource.CLOSED) { disconnect(); setTimeout(connect, 5000); }
  });
}

function disconnect() {
  if (stream) stream.close();
  stream = null;
}

document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : connect()));
addEventListener("pagehide", disconnect);
addEventListener("pageshow", connect);

// --- plots: Plotly is large, so it is loaded only when a plot is visible

let plots = null;

function shown() {
  shownTimes(main);
  for (const log of main.querySelectorAll("[data-follow]")) {
    if (!log.dataset.seen || log.scrollHeight - log.scrollTop - log.clientHeight < 60) log.scrollTop = log.scrollHeight;
    log.dataset.seen = "1";
  }
  drawPlots();
}

function visiblePlots() {
  return [...main.querySelectorAll("[data-plot]")].filter((place) => !place.closest("details:not([open])"));
}

function drawPlots() {
  if (!visiblePlots().length) return;
  plots ??= import("./plots.js").then((module) => module.loaded(root));
  plots.then((draw) => visiblePlots().forEach(draw));
}

main.addEventListener("toggle", drawPlots, true);  // a toggle event does not bubble

// --- actions

let hiding = 0;

function say(text, isBad = false, shownMs = isBad ? 15000 : 6000) {
  notice.textContent = text;
  notice.classList.toggle("bad", isBad);
  notice.hidden = false;
  clearTimeout(hiding);
  hiding = setTimeout(() => { notice.hidden = true; }, shownMs);
}

function confirmed(title, text, yes, no) {
  document.getElementById("confirm-title").textContent = title;
  document.getElementById("confirm-text").textContent = text;
  document.getElementById("confirm-yes").textContent = yes;
  dialog.querySelector("[value=no]").textContent = no || "Keep as it is";
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

async function act(name, args, button) {
  button.disabled = true;
  say("working …");
  try {
    const answer = await fetch(`${root}api/actions/${name}`, {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-Shoal-CSRF": document.querySelector("meta[name=csrf]").content },
      body: JSON.stringify(args),
    });
    const document_ = await answer.json();
    say(answer.ok ? document_.done : document_.error, !answer.ok);
  } catch {
    say("the server did not answer: look whether the action was carried out", true);
  } finally {
    button.disabled = false;
    await refresh();
    if (button.isConnected) button.focus(); else main.focus();
  }
}

main.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-action]");
  if (!button) return;
  const { action, title, text, yes, no, arguments: args } = button.dataset;
  if (await confirmed(title, text, yes, no)) await act(action, JSON.parse(args || "{}"), button);
});

// The engine itself carries this out, with the permissions of the user who is logged in there.
main.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-train-again]");
  if (!button) return;
  try {
    const plan = await (await fetch(button.dataset.trainAgain)).json();
    if (plan.error) return say(plan.error, true);
    if (!(await confirmed("Train again what failed?", plan.question, "Train again"))) return;
    const answer = await fetch(plan.path, {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(plan.body),
    });
    if (answer.ok) return say("the tasks start again");
    const why = (await answer.json()).detail;
    say(typeof why === "string" ? why : JSON.stringify(why), true);
  } catch {
    say("the server did not answer: look at the run whether its tasks start again", true);
  }
});

main.addEventListener("submit", async (event) => {
  const form = event.target.closest("form[data-action=alter]");
  if (!form) return;
  event.preventDefault();
  const button = form.querySelector("button");
  const [least, most] = ["min_nodes", "max_nodes"].map((name) => Number(form.elements[name].value));
  const text = `The pool may then have ${least} to ${most} nodes.`;
  if (!(await confirmed(button.dataset.title, text, button.dataset.yes))) return;
  for (const input of form.querySelectorAll("input")) delete input.dataset.edited;
  await act("alter", { pool: form.dataset.pool, min_nodes: least, max_nodes: most }, button);
});

// A field that the user edits is not overwritten by newer contents.
main.addEventListener("input", (event) => { event.target.dataset.edited = "1"; });

// --- Inside Airflow's frame, a link cannot open a new window. So the script shows the link's address for copying.

if (window !== window.top) {
  main.addEventListener("click", (event) => {
    const link = event.target.closest("a[target=_blank]");
    if (link) say(`If no tab opens, copy this address: ${link.href}`, false, 30000);
  });
}

shown();
setInterval(() => shownTimes(main), 1000);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", shown);
connect();
