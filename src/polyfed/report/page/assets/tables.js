"use strict";
// Tables: sorted by a column, copied as CSV, and as cards on a narrow screen. Without it they are read as they are.
(() => {
  const number = (text) => {
    const found = text.replaceAll("−", "-").replace(/(\d) (?=\d{3})/g, "$1").match(/^[<>]?([-+]?\d+(\.\d+)?)/); // "site-12" is a name
    return found ? Number(found[1]) : null;
  };
  const textOf = (cell) => [...cell.childNodes].filter((part) => !part.classList?.contains("say")).map((part) => part.textContent).join(" ").trim();
  const order = (table, column, button) => {
    const head = button.closest("th"), down = head.getAttribute("aria-sort") === "descending";
    for (const one of table.querySelectorAll("th[aria-sort]")) one.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "ascending" : "descending");
    const rows = [...table.tBodies[0].rows].filter((row) => !row.classList.contains("total"));
    const texts = new Map(rows.map((row) => [row, textOf(row.cells[column])]));
    const numeric = rows.filter((row) => number(texts.get(row)) !== null).length * 2 > rows.length;
    const value = (row) => (numeric ? number(texts.get(row)) : texts.get(row));
    rows.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === null || y === null) return (x === null) - (y === null); // what is not known comes last
      return (numeric ? x - y : x.localeCompare(y, "en", { numeric: true })) * (down ? 1 : -1);
    });
    table.tBodies[0].prepend(...rows);
  };
  // A spreadsheet reads a text that begins with one of these as a formula.
  const safe = (text) => (/^[=@\t]|^[+-](?!\d)/.test(text) ? `'${text}` : text);
  const csv = (table) => [...table.rows].map((row) => [...row.cells].filter((cell) => !cell.matches(".drawn, .axis-label"))
    .map((cell) => safe((textOf(cell) === "–" ? "" : textOf(cell)).replaceAll("−", "-").replaceAll(/\s+/g, " ")))
    .map((text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text)).join(",")).join("\n");
  const copy = async (text, button) => {
    let done = true;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const box = document.body.appendChild(Object.assign(document.createElement("textarea"), { value: text }));
      box.select();
      done = document.execCommand("copy"); // where a page from a file has no clipboard
      box.remove();
    }
    button.textContent = done ? "Copied" : "Not copied: the browser forbids it";
    setTimeout(() => { button.textContent = "Copy as CSV"; }, 2000);
  };
  const button = (kind, ...inside) => {
    const found = Object.assign(document.createElement("button"), { type: "button", className: kind });
    found.append(...inside);
    return found;
  };
  const dress = (table) => {
    if (table.dataset.dressed !== undefined || !table.tHead) return;
    table.dataset.dressed = "";
    const heads = [...table.tHead.rows[0].cells], rows = table.tBodies[0].rows;
    if (rows.length > 1) {
      const made = button("csv", "Copy as CSV");
      made.addEventListener("click", () => copy(csv(table), made));
      table.closest(".wide").after(made);
    }
    if (table.classList.contains("matrix")) return;
    if (rows.length > 2) heads.forEach((head, k) => {
      if (head.matches(".axis-label") || !head.textContent.trim()) return;
      const made = button("sort", ...head.childNodes);
      made.addEventListener("click", () => order(table, k, made));
      head.append(made);
    });
    if (heads.length > 3) {
      table.dataset.cards = "";
      for (const row of rows) [...row.cells].forEach((cell, k) => {
        if (cell.tagName === "TD" && !cell.matches(".drawn") && !cell.querySelector(".badge")) cell.dataset.l ??= heads[k].textContent.trim();
      });
      // Cards are no table to a browser: its parts are named, for those who listen.
      for (const [name, role] of [["table", "table"], ["tr", "row"], ["th[scope=row]", "rowheader"], ["th[scope=col]", "columnheader"], ["td", "cell"]])
        for (const part of name === "table" ? [table] : table.querySelectorAll(name)) part.setAttribute("role", role);
    }
  };
  const all = () => { for (const table of document.querySelectorAll(".wide > table")) dress(table); };
  document.addEventListener("drawn", all); // by curves.js
  // The keyboard stops at a table only where it can scroll it.
  const stops = new ResizeObserver((changes) => { for (const { target } of changes) target.tabIndex = target.scrollWidth > target.clientWidth ? 0 : -1; });
  for (const box of document.querySelectorAll(".wide")) stops.observe(box);
  all();
})();
