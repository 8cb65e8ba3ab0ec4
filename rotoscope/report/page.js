"use strict";
(() => {
  const { specs, datasets } = JSON.parse(document.getElementById("figure-data").textContent);

  // Vega writes into the rows it is given, so every view gets its own.
  const rows = (name) => {
    const columns = datasets[name];
    const names = Object.keys(columns);
    const count = names.length ? columns[names[0]].length : 0;
    return Array.from({ length: count }, (_, i) => Object.fromEntries(names.map((key) => [key, columns[key][i]])));
  };

  const draw = async (place) => {
    const { spec, datasets: used } = specs[place.dataset.figure];
    const own = { ...spec, datasets: Object.fromEntries(used.map((name) => [name, rows(name)])) };
    if (typeof spec.width === "number") {
      // A single view follows the width of the page while its labels still fit; then it scrolls, as composed ones do.
      Object.assign(place.style, { maxWidth: `${spec.width + 190}px`, minWidth: "620px" });
      own.width = "container";
    } else {
      place.style.width = "max-content";
    }
    await vegaEmbed(place, own, {
      mode: "vega-lite",
      renderer: "svg",
      ast: true,
      downloadFileName: place.dataset.figure,
      actions: { export: true, source: false, compiled: false, editor: false },
    });
  };

  const drawAll = async () => {
    for (const place of document.querySelectorAll("[data-figure]")) {
      try {
        await draw(place);
      } catch (error) {
        place.textContent = `This figure could not be drawn (${error.message}).`;
        console.error(place.dataset.figure, error);
      }
      // Let the page answer its reader between two charts.
      await new Promise((done) => setTimeout(done));
    }
    document.documentElement.dataset.drawn = "all";
  };

  const sortBy = (head) => {
    const table = head.closest("table");
    const column = head.cellIndex;
    const ascending = head.getAttribute("aria-sort") !== "ascending";
    table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    const key = (row) => row.cells[column].dataset.sort ?? row.cells[column].textContent;
    const body = table.tBodies[0];
    const compare = (a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === "" || y === "") return (x === "") - (y === "");  // missing values stay last
      const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
      return ascending ? order : -order;
    };
    body.append(...[...body.rows].sort(compare));
  };

  document.querySelectorAll("table.sortable th button").forEach((button) => {
    button.addEventListener("click", () => sortBy(button.closest("th")));
  });
  document.getElementById("all-rules").addEventListener("click", (event) => {
    const open = event.target.getAttribute("aria-pressed") !== "true";
    document.querySelectorAll("#scorecard details").forEach((details) => { details.open = open; });
    event.target.setAttribute("aria-pressed", open);
    event.target.textContent = open ? "Hide all rules" : "Show all rules";
  });
  drawAll();
})();
