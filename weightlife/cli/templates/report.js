"use strict";
(() => {
  // Everything that comes from a checkpoint is put on the page as text, never as markup.
  const PAGE = 100;
  const $ = (id) => document.getElementById(id);
  const holder = $("layer-data");
  const collator = new Intl.Collator("en", { numeric: true });

  // A link to a load opens it.
  const reveal = () => {
    const target = location.hash.length > 1 ? $(decodeURIComponent(location.hash.slice(1))) : null;
    if (target && target.tagName === "DETAILS") target.open = true;
  };
  window.addEventListener("hashchange", reveal);
  reveal();

  if (!holder) return;
  const data = JSON.parse(holder.textContent);
  const body = $("layer-rows");
  const status = $("layer-status");
  const heads = [...document.querySelectorAll("#layer-table th[data-key]")];
  const state = { session: data.sessions.length - 1, key: "order", up: true, page: 0 };
  let rows = [];
  let shown = [];

  const seconds = (value) => {
    if (!value) return "";
    if (value >= 1) return value.toFixed(1) + " s";
    return value >= 0.001 ? (value * 1e3).toFixed(1) + " ms" : Math.round(value * 1e6) + " \u00b5s";
  };

  const take = () => {
    const session = data.sessions[state.session];
    const table = data.tables[session.table];
    const idle = new Set(session.untouched);
    const spent = new Map(session.seconds);
    rows = table.names.map((name, order) => ({
      order,
      name: data.strings[name],
      strategy: data.strings[table.strategies[order]],
      reason: data.strings[table.reasons[order]],
      written: idle.has(order) ? "not written" : "written",
      seconds: spent.get(order) || 0,
    }));
    for (const row of rows) row.text = (row.name + "\n" + row.reason).toLowerCase();
  };

  const select = () => {
    const words = $("layer-filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const strategy = $("layer-strategy").value;
    const written = $("layer-written").value;
    shown = rows.filter(
      (row) =>
        (!strategy || row.strategy === strategy) &&
        (!written || row.written === written) &&
        words.every((word) => row.text.includes(word)),
    );
    const sign = state.up ? 1 : -1;
    const numeric = state.key === "order" || state.key === "seconds";
    shown.sort((a, b) => {
      const x = a[state.key], y = b[state.key];
      return sign * (numeric ? x - y : x === y ? 0 : collator.compare(x, y)) || a.order - b.order;
    });
  };

  const cell = (row, label, text, kind) => {
    const td = document.createElement("td");
    td.dataset.label = label;
    if (!text) td.className = "blank";
    const span = document.createElement("span");
    span.textContent = text;
    if (kind) span.className = kind;
    td.append(span);
    row.append(td);
  };

  const draw = () => {
    const pages = Math.max(1, Math.ceil(shown.length / PAGE));
    state.page = Math.min(Math.max(0, state.page), pages - 1);
    const from = state.page * PAGE;
    const part = shown.slice(from, from + PAGE);
    const fresh = document.createDocumentFragment();
    for (const row of part) {
      const tr = document.createElement("tr");
      cell(tr, "Layer", row.name, "name");
      cell(tr, "Strategy", row.strategy);
      cell(tr, "Reason", row.reason, "name");
      cell(tr, "This load", row.written);
      cell(tr, "Time", seconds(row.seconds), "num");
      fresh.append(tr);
    }
    body.replaceChildren(fresh);
    const count = shown.length.toLocaleString("en");
    status.textContent = shown.length
      ? `${(from + 1).toLocaleString("en")} to ${(from + part.length).toLocaleString("en")} of ${count} layers` +
        (shown.length < rows.length ? ` (${rows.length.toLocaleString("en")} in all)` : "")
      : `No layer fits the filter (${rows.length.toLocaleString("en")} in all)`;
    $("layer-previous").disabled = state.page === 0;
    $("layer-next").disabled = state.page >= pages - 1;
    for (const head of heads) {
      const mine = head.dataset.key === state.key;
      head.setAttribute("aria-sort", mine ? (state.up ? "ascending" : "descending") : "none");
    }
    $("layer-sort").value = state.key + (state.up ? "" : "-");
  };

  const update = () => { state.page = 0; select(); draw(); };
  const show = (session) => {
    state.session = session;
    $("layer-session").value = String(session);
    take();
    const strategies = [...new Set(rows.map((row) => row.strategy))].sort();
    const menu = $("layer-strategy"), before = menu.value;
    menu.replaceChildren(new Option("all", ""), ...strategies.map((name) => new Option(name, name)));
    menu.value = strategies.includes(before) ? before : "";
    update();
  };

  let timer = 0;
  $("layer-filter").addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(update, 120); });
  $("layer-strategy").addEventListener("change", update);
  $("layer-written").addEventListener("change", update);
  $("layer-session").addEventListener("change", (event) => show(Number(event.target.value)));
  $("layer-sort").addEventListener("change", (event) => {
    state.up = !event.target.value.endsWith("-");
    state.key = event.target.value.replace("-", "");
    update();
  });
  for (const head of heads) {
    head.querySelector("button").addEventListener("click", () => {
      const same = state.key === head.dataset.key;
      // times are looked at from the longest down
      state.up = same ? !state.up : head.dataset.key !== "seconds";
      state.key = head.dataset.key;
      update();
    });
  }
  $("layer-previous").addEventListener("click", () => { state.page -= 1; draw(); });
  $("layer-next").addEventListener("click", () => { state.page += 1; draw(); });
  for (const link of document.querySelectorAll("a[data-session]")) {
    link.addEventListener("click", () => show(Number(link.dataset.session)));
  }
  show(state.session);
})();
