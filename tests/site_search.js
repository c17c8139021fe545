// Asks the search of a built site, by the theme's own worker: node site_search.js SITE WORDS... prints the pages of each, best first, as JSON.
const fs = require("fs"), vm = require("vm");
const [site, ...queries] = process.argv.slice(2);
const folder = site + "/assets/javascripts/workers/";
const worker = fs.readFileSync(folder + fs.readdirSync(folder).find(name => /^search.*\.js$/.test(name)), "utf8");
const index = JSON.parse(fs.readFileSync(site + "/search/search_index.json"));
const words = fs.readFileSync(site + "/search_words.js", "utf8");
const leaveOutSmallWords = vm.runInNewContext(words + "; leaveOutSmallWords", { Worker: class { postMessage() {} } });
let receive, reply;
const page = vm.createContext({
  addEventListener: (_, listener) => { receive = listener; }, postMessage: message => { reply(message); },
  console: { warn() {} }, URL, location: { href: "http://localhost/" }, importScripts() {},
});
page.self = page;
vm.runInContext(worker, page);
const ask = message => new Promise(resolve => { reply = resolve; receive({ data: message }); });
(async () => {
  await ask({ type: 0, data: { config: index.config, docs: index.docs, options: { suggest: false } } });
  const found = {};
  for (const query of queries) {
    const answer = await ask({ type: 2, data: leaveOutSmallWords(query) });
    found[query] = answer.data.items.map(sections => sections[0].location.split("#")[0]);
  }
  console.log(JSON.stringify(found));
})();
