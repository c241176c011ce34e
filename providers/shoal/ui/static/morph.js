// Update an element of the page to equal a newer version of it, with as few changes as possible. Focus, scroll
// positions, selections and fields that the user edits stay as they are.

const OWN = new Set(["data-seen", "data-edited", "data-drawn", "open", "disabled"]);

function keyOf(node) {
  return node.nodeType === Node.ELEMENT_NODE ? node.id || node.dataset.key || null : null;
}

function attributes(old, fresh) {
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && !OWN.has(name) && !old.hasAttribute("data-drawn")) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) === value) continue;
    if (old.hasAttribute("data-drawn") && name === "class") continue;  // Plotly adds classes of its own
    old.setAttribute(name, value);
  }
}

function isSame(old, fresh) {
  return old.nodeType === fresh.nodeType && old.nodeName === fresh.nodeName && keyOf(old) === keyOf(fresh);
}

export function morph(old, fresh) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
    return;
  }
  if (old.dataset.edited || old.contains(document.activeElement) && old.matches("input, select")) return;
  const hasSameTime = old.matches("time[data-at], [data-since]")
    && old.dataset.at === fresh.dataset.at && old.dataset.since === fresh.dataset.since;
  if (hasSameTime) return;  // times.js has already written a text in local time
  attributes(old, fresh);
  if (old.matches("input")) old.value = fresh.getAttribute("value") ?? "";
  if (old.matches("[data-plot]")) return;
  const keyed = new Map();
  for (const child of old.children) if (keyOf(child)) keyed.set(keyOf(child), child);
  let next = old.firstChild;
  for (const child of [...fresh.childNodes]) {
    const key = keyOf(child);
    const match = key ? keyed.get(key) : next;
    if (match && isSame(match, child)) {
      if (match === next) next = next.nextSibling; else old.insertBefore(match, next);
      morph(match, child);
    } else {
      old.insertBefore(document.importNode(child, true), next);
    }
  }
  while (next) {
    const after = next.nextSibling;
    next.remove();
    next = after;
  }
}
