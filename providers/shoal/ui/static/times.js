// Show times relative to now, such as "5 min ago", and update the durations of what still runs.

const UNITS = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];

export function duration(seconds) {
  const left = Math.max(0, Math.round(seconds));
  const index = UNITS.findIndex(([, length]) => left >= length);
  if (index < 0) return "0 s";
  const [unit, length] = UNITS[index];
  const rest = index < 3 ? Math.floor((left % length) / UNITS[index + 1][1]) : 0;
  return `${Math.floor(left / length)} ${unit}${rest ? ` ${rest} ${UNITS[index + 1][0]}` : ""}`;
}

function distance(at, now) {
  const seconds = now - at;
  const [unit, length] = UNITS.find(([, each]) => Math.abs(seconds) >= each) || ["s", 1];
  const text = `${Math.floor(Math.abs(seconds) / length)} ${unit}`;
  return Math.abs(seconds) < 5 ? "just now" : seconds < 0 ? `in ${text}` : `${text} ago`;
}

function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function shownTimes(root) {
  const now = Date.now() / 1000;
  for (const element of root.querySelectorAll("time[data-at]")) {
    const at = Number(element.dataset.at);
    write(element, distance(at, now));
    element.title = new Date(at * 1000).toLocaleString();
  }
  for (const element of root.querySelectorAll("[data-since]")) {
    write(element, duration(now - Number(element.dataset.since)));
  }
}
