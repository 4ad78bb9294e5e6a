// the search's order: a name that is what was asked for, with spaces for underscores, comes first; the rest is sphinx's
const asked = new URLSearchParams(window.location.search).get("q")?.trim().toLowerCase().replace(/[\s_]+/g, "_");
var Scorer = {
  score: ([, title, , , score]) => (title.split(".").pop().toLowerCase() === asked ? score + 100 : score),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
